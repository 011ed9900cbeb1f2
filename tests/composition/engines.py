"""Whole engines, asked for a batch: one, on one or several ranks; those that share experts; behind prefill engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from deployments.frontend.retry import RetryState
from deployments.frontend.sequence import ReportedError
from engine.config import EngineConfig
from engine.core.door.inputs import CacheCleared
from engine.core.engine import EngineCore
from engine.core.output import Event
from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.kv_tiers.kv_offloading import KVOffloading
from engine.serving.server import EngineServer
from engine.text.chat_tokenizer import ChatTokenizer
from engine.text.text_stream import TextStream
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import Abort, Add, Command, ResetPrefixCache
from engine.wire.parts.costs import SequenceCost
from engine.wire.parts.handoffs import MoveRequests
from engine.wire.parts.holds import HoldStats
from engine.wire.parts.kv_fetching import KVHolder
from engine.wire.remote_request import KVSource, Peer
from engine.wire.stats.engine_stats import EngineStats
from engine.wire.token_delta import ErrorInfo, TokenDelta, TokenLogprob
from tests.engine.kv_transfer.pair import Pair, is_empty
from tests.engine.kv_transfer.test_data_parallel import Pools
from tests.engine.kv_transfer.test_data_parallel import running as shared_pair
from tests.rank_pool import RankPool
from tests.shared_engines import Engines, running

MOST_HELD = 10_000  # tokens; an engine finds how many the other one has


@dataclass(frozen=True)
class Asked:
    """A sequence that a client asks for. abort_after: tokens after which the client leaves; None if it stays."""

    message: GenerateRequest
    abort_after: int | None = None


@dataclass
class Answer:
    """All that a client may see of a sequence, except times and costs, and how much of its prompt was cached."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    pooled: bytes = b""
    error: ErrorInfo | None = None

    def differs(self, other: Answer) -> list[str]:
        """Return the names of the fields that are not equal, bit for bit."""
        return [name for name, value in vars(self).items() if value != getattr(other, name)]


class Stream:
    """Takes the deltas of a sequence as a frontend does."""

    def __init__(self, asked: Asked, tokenizer: ChatTokenizer):
        self.answer, self.costs = Answer(), list[float]()
        self._leaves_after = asked.abort_after
        self._text = TextStream(asked.message.params, tokenizer) if asked.message.params.stop else None

    @property
    def ended(self) -> bool:
        return self.answer.finish_reason is not None

    def take(self, delta: TokenDelta) -> Literal["stop", "abort"] | None:
        """Return why the frontend ends the sequence in the engine now; None if it does not."""
        if self.ended:
            return None
        answer = self.answer
        answer.prompt_logprobs = delta.prompt_logprobs or answer.prompt_logprobs
        answer.pooled, answer.error = delta.answer, delta.error
        self.costs += [cost.compute_s for cost in delta.records(SequenceCost)]
        if self._text is None or delta.error is not None:
            answer.tokens += delta.token_ids
            answer.logprobs += delta.logprobs or []
            answer.finish_reason, answer.stop_reason = delta.finish_reason, delta.stop_reason
        else:
            chunk = self._text.add(delta)
            answer.tokens += chunk.token_ids
            answer.logprobs += chunk.logprobs or []
            answer.finish_reason, answer.stop_reason = chunk.finish_reason, chunk.stop_reason
            if chunk.finish_reason is not None and delta.finish_reason is None:
                return "stop"
        if self._leaves_after is not None and len(answer.tokens) >= self._leaves_after:
            del answer.tokens[self._leaves_after :], answer.logprobs[self._leaves_after :]
            had_ended, answer.finish_reason, answer.stop_reason = self.ended, "abort", None
            return None if had_ended else "abort"
        return None


class Session:
    """An engine with all that belongs to it. Its schedulers' books are checked after each step."""

    cores: list[EngineCore]

    def __init__(self, tokenizer: ChatTokenizer):
        self._tokenizer, self._batches = tokenizer, 0

    def ask(self, asked: Sequence[Asked], again: bool = False) -> dict[str, Stream]:
        """Answer a batch, by request id. again: whether its prompts continue those of another. Raises ServingError if
        one of the requests is refused."""
        self._batches += 1  # a delta of an earlier batch, whose sequence the frontend has ended, may still come
        own = [each.message.request_id for each in asked]
        sent = [f"{name} of {self._batches}" for name in own]
        messages = [
            msgspec.structs.replace(each.message, request_id=name) for each, name in zip(asked, sent, strict=True)
        ]
        streams = {name: Stream(each, self._tokenizer) for each, name in zip(asked, sent, strict=True)}
        self._run(messages, streams, again)
        assert all(stream.ended for stream in streams.values())
        for core in self.cores:
            core.scheduler.check()
            flush(core)
            stats = core.stats()
            holds = stats.record(HoldStats)
            assert not core.scheduler.queue.live and stats.blocks_used == (holds.device_blocks if holds else 0), (
                "something is left behind"
            )
        return dict(zip(own, streams.values(), strict=True))

    def stats(self) -> list[EngineStats]:
        """Of the engine that clients ask, then of the others in this process."""
        return [core.stats() for core in self.cores]

    def forget(self) -> None:
        """Empty the prefix cache, and the tiers below it. Nothing may be under way."""
        raise NotImplementedError

    def _run(self, messages: list[GenerateRequest], streams: dict[str, Stream], again: bool) -> None:
        raise NotImplementedError


class OneEngine(Session):
    """In this process, with its other ranks in others."""

    def __init__(self, engine: EngineCore | Engines, tokenizer: ChatTokenizer):
        super().__init__(tokenizer)
        self._engine = engine
        self._own = engine.group if isinstance(engine, Engines) else engine
        self.cores = [engine.core if isinstance(engine, Engines) else engine]

    def _run(self, messages: list[GenerateRequest], streams: dict[str, Stream], again: bool) -> None:
        for message in messages:
            self._own.check(message)
        for message in messages:
            self._own.add(message)
        while self._engine.has_work:
            for event in self._own.step():
                reason = streams[event.delta.request_id].take(event.delta)
                if reason is not None:
                    self._own.abort(event.delta.request_id, reason)
            self.cores[0].scheduler.check()

    def forget(self) -> None:
        self.cores[0].apply(CacheCleared())


class BehindPrefill(Session):
    """A decode engine, and the prefill engine that computes prompts for it."""

    def __init__(self, pair: Pair, tokenizer: ChatTokenizer):
        super().__init__(tokenizer)
        self._pair = pair
        self.cores = [engine.server._core for engine in (pair.decode, pair.prefill)]

    def _run(self, messages: list[GenerateRequest], streams: dict[str, Stream], again: bool) -> None:
        ingress = self._pair.ingress
        for message in messages:
            ingress.send(Add(msgspec.structs.replace(message, reply_to=ingress.address)))
        while not all(stream.ended for stream in streams.values()):
            for delta in ingress.receive().deltas:
                stream = streams.get(delta.request_id)
                if stream is not None and (reason := stream.take(delta)) is not None:
                    ingress.send(Abort(delta.request_id, reason))
        self._pair.settle()

    def forget(self) -> None:
        for engine in (self._pair.decode, self._pair.prefill):
            engine.send(ResetPrefixCache())
        self._pair.settle()


class SharedBehindPrefill(Session):
    """Decode engines that share experts, and prefill engines that do."""

    def __init__(self, pools: Pools, tokenizer: ChatTokenizer):
        super().__init__(tokenizer)
        self._pools = pools
        self.cores = [group.thread.server._core for group in (pools.decode, pools.prefill)]

    def _run(self, messages: list[GenerateRequest], streams: dict[str, Stream], again: bool) -> None:
        ingresses = self._pools.decode.ingresses
        homes = {each.request_id: ingresses[i % len(ingresses)] for i, each in enumerate(messages)}
        for message in messages:
            ingress = homes[message.request_id]
            ingress.deltas.pop(message.request_id, None)
            ingress.send(Add(msgspec.structs.replace(message, reply_to=ingress.address)))
        taken = dict.fromkeys(homes, 0)

        def ended() -> bool:
            for name, ingress in homes.items():
                for delta in ingress.deltas[name][taken[name] :]:
                    taken[name] += 1
                    if (reason := streams[name].take(delta)) is not None:
                        ingress.send(Abort(name, reason))
            return all(stream.ended for stream in streams.values())

        self._pools.run_until(ended)
        settle(self._pools)

    def forget(self) -> None:
        for group in (self._pools.decode, self._pools.prefill):
            for ingress in group.ingresses:
                ingress.send(ResetPrefixCache())
        settle(self._pools)


class BetweenReplicas(Session):
    """Two engines of which one fetches what the other has cached, or goes on with requests that have begun there. If
    KV is fetched, the first batch is for the other engine."""

    def __init__(
        self,
        servers: Sequence[EngineServer],
        send: Sequence[Callable[[Command], None]],
        reply_to: str,
        receive: Callable[[], list[TokenDelta]],
        settle: Callable[[], None],
        tokenizer: ChatTokenizer,
    ):
        """servers: the engine that clients ask, the other one, and perhaps a prefill engine. send: to each of them.
        receive: returns the next deltas of the two."""
        super().__init__(tokenizer)
        self.cores = [server._core for server in servers]
        self._send, self._reply_to, self._receive, self._settle = send, reply_to, receive, settle
        handoff = self.cores[0].config.handoff  # None if the model keeps no KV that another engine could use
        self._fetches = handoff is not None and handoff.enable_prefix_fetching
        self._moves = handoff is not None and handoff.move_requests
        self._leaves: int | None = None
        for i, server in enumerate(servers[:2]):
            self._watch(i, server)

    def forget(self) -> None:
        for send in self._send:
            send(ResetPrefixCache())
        self._settle()

    def _run(self, messages: list[GenerateRequest], streams: dict[str, Stream], again: bool) -> None:
        first = 1 if self._fetches and not again else 0
        self._leaves = first if self._moves else None
        holder = KVHolder(self._peer(1), MOST_HELD) if self._fetches and again else None
        retries = {message.request_id: RetryState(message.asking(holder), 0, 0.0) for message in messages}
        places = dict.fromkeys(retries, first)
        for name in retries:
            self._attempt(retries[name], places[name])
        while not all(stream.ended for stream in streams.values()):
            for delta in self._receive():
                name = delta.request_id.partition(".")[0]
                if name not in streams:
                    continue
                retry, stream = retries[name], streams[name]
                if delta.error is not None and delta.error.code == "moved":
                    if not stream.ended:
                        retry.replay(ReportedError(delta.error), *delta.records(KVSource))
                        places[name] = 1 - first
                        self._attempt(retry, places[name])
                    continue
                if (reason := stream.take(retry.add(delta))) is not None:
                    self._send[places[name]](Abort(delta.request_id, reason))
        self._settle()

    def _attempt(self, retry: RetryState, place: int) -> None:
        self._send[place](Add(msgspec.structs.replace(retry.attempt(0.0), reply_to=self._reply_to)))

    def _peer(self, number: int) -> Peer:
        peer = self.cores[number].scheduler.parts[Handoffs].requests.peer
        assert peer is not None
        return peer

    def _watch(self, number: int, server: EngineServer) -> None:
        """Let requests leave an engine once one has a token, in the engine's own thread, so that none ends before."""
        core, step = server._core, server._core.step

        def step_and_leave() -> list[Event]:
            events = step()
            if self._leaves == number and any(r.num_output and not r.leaving for r in core.scheduler.queue.running):
                server._endpoint.handle(MoveRequests(len(core.scheduler.queue.live)))
            return events

        core.step = step_and_leave  # type: ignore[method-assign]


def between_replicas(pair: Pair, tokenizer: ChatTokenizer) -> BetweenReplicas:
    """Of engines that have ranks of their own. The third is the second decode engine."""
    here, prefill, *more = pair.engines
    engines = [here, more[0], prefill] if more else [here, prefill]
    return BetweenReplicas(
        [engine.server for engine in engines],
        [engine.send for engine in engines],
        pair.ingress.address,
        lambda: pair.ingress.receive().deltas,
        pair.settle,
        tokenizer,
    )


def between_shared_replicas(pools: Pools, tokenizer: ChatTokenizer) -> BetweenReplicas:
    """Of the first engines of two groups that share experts."""
    groups = [pools.decode, pools.prefill]
    ingress = pools.decode.ingresses[0]

    def receive() -> list[TokenDelta]:
        ingress.deltas.clear()
        ingress.batches.clear()
        pools.run_until(lambda: ingress.batches)
        return [delta for batch in ingress.batches for delta in batch.deltas]

    return BetweenReplicas(
        [group.thread.server for group in groups],
        [group.ingresses[0].send for group in groups],
        ingress.address,
        receive,
        lambda: settle(pools),
        tokenizer,
    )


def settle(pools: Pools) -> None:
    """Wait until no engine holds anything."""
    groups = pools.decode, pools.prefill
    for group in groups:
        group.statuses.clear()
    pools.run_until(
        lambda: all(
            len(group.statuses) == len(group.ingresses) and all(map(is_empty, group.statuses.values()))
            for group in groups
        )
    )


def flush(core: EngineCore) -> None:
    """Let all blocks go down to the tiers, if there are any: until then they are in use."""
    tiers = core.scheduler.parts.get(KVOffloading)
    while tiers is not None and not tiers.flushed():
        core.step()


class Openers:
    """Opens engines, with ranks from pools that are used again."""

    def __init__(self) -> None:
        self._pools: list[RankPool] = []

    @contextmanager
    def open(self, config: EngineConfig) -> Iterator[Session]:
        tokenizer = ChatTokenizer.from_folder(Path(config.model))
        engine: AbstractContextManager[Any]
        with self._pool() as pool:
            if config.handoff is not None:
                handoff = config.handoff
                moves = handoff.enable_prefix_fetching or handoff.move_requests
                there = replace(config, kv_events_config=None)
                prefill = replace(there, handoff=replace(handoff, role="prefill"))
                with self._pool() as second, self._pool() as third:
                    if config.data_parallel_size > 1:
                        with shared_pair(config, there if moves else prefill, (pool, second)) as pools:
                            yield (between_shared_replicas if moves else SharedBehindPrefill)(pools, tokenizer)
                    elif not moves:
                        with Pair(config, prefill, (pool, second)) as pair:
                            yield BehindPrefill(pair, tokenizer)
                    elif handoff.role == "replica":
                        with Pair(config, there, (pool, second)) as pair:
                            yield between_replicas(pair, tokenizer)
                    else:
                        with Pair(config, prefill, (pool, second, third), there) as pair:
                            yield between_replicas(pair, tokenizer)
                return
            engine = running(pool, config) if config.data_parallel_size > 1 else pool.engine(config)
            with engine as core:
                yield OneEngine(core, tokenizer)

    def close(self) -> None:
        for pool in self._pools:
            pool.close()

    @contextmanager
    def _pool(self) -> Iterator[RankPool]:
        pool = self._pools.pop() if self._pools else RankPool()
        try:
            yield pool
        except BaseException:
            pool.kill()  # its ranks may wait for what does not come
            raise
        self._pools.append(pool)
