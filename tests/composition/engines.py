"""Whole engines, asked for a batch: one, on one or several ranks; those that share experts; behind prefill engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from engine.config import EngineConfig
from engine.core.door.inputs import CacheCleared
from engine.core.engine import EngineCore
from engine.parts.kv_tiers.kv_offloading import KVOffloading
from engine.text.chat_tokenizer import ChatTokenizer
from engine.text.text_stream import TextStream
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import Abort, Add, ResetPrefixCache
from engine.wire.parts.costs import SequenceCost
from engine.wire.parts.holds import HoldStats
from engine.wire.stats.engine_stats import EngineStats
from engine.wire.token_delta import ErrorInfo, TokenDelta, TokenLogprob
from tests.engine.kv_transfer.pair import Pair, is_empty
from tests.engine.kv_transfer.test_data_parallel import Pools
from tests.engine.kv_transfer.test_data_parallel import running as shared_pair
from tests.rank_pool import RankPool
from tests.shared_engines import Engines, running


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
        self._tokenizer = tokenizer

    def ask(self, asked: Sequence[Asked]) -> dict[str, Stream]:
        """Answer a batch, by request id. Raises ServingError if one of the requests is refused."""
        streams = {each.message.request_id: Stream(each, self._tokenizer) for each in asked}
        self._run([each.message for each in asked], streams)
        assert all(stream.ended for stream in streams.values())
        for core in self.cores:
            core.scheduler.check()
            flush(core)
            stats = core.stats()
            holds = stats.record(HoldStats)
            assert not core.scheduler.queue.live and stats.blocks_used == (holds.device_blocks if holds else 0), (
                "something is left behind"
            )
        return streams

    def stats(self) -> list[EngineStats]:
        """Of the engine that clients ask, then of the others in this process."""
        return [core.stats() for core in self.cores]

    def forget(self) -> None:
        """Empty the prefix cache, and the tiers below it. Nothing may be under way."""
        raise NotImplementedError

    def _run(self, messages: list[GenerateRequest], streams: dict[str, Stream]) -> None:
        raise NotImplementedError


class OneEngine(Session):
    """In this process, with its other ranks in others."""

    def __init__(self, engine: EngineCore | Engines, tokenizer: ChatTokenizer):
        super().__init__(tokenizer)
        self._engine = engine
        self._own = engine.group if isinstance(engine, Engines) else engine
        self.cores = [engine.core if isinstance(engine, Engines) else engine]

    def _run(self, messages: list[GenerateRequest], streams: dict[str, Stream]) -> None:
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

    def _run(self, messages: list[GenerateRequest], streams: dict[str, Stream]) -> None:
        ingress = self._pair.ingress
        for message in messages:
            ingress.send(Add(msgspec.structs.replace(message, reply_to=ingress.address)))
        while not all(stream.ended for stream in streams.values()):
            for delta in ingress.receive().deltas:
                if (reason := streams[delta.request_id].take(delta)) is not None:
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

    def _run(self, messages: list[GenerateRequest], streams: dict[str, Stream]) -> None:
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
        self._settle()

    def forget(self) -> None:
        for group in (self._pools.decode, self._pools.prefill):
            for ingress in group.ingresses:
                ingress.send(ResetPrefixCache())
        self._settle()

    def _settle(self) -> None:
        """Wait until no engine holds anything."""
        groups = self._pools.decode, self._pools.prefill
        for group in groups:
            group.statuses.clear()
        self._pools.run_until(
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
                prefill = replace(config, handoff=replace(config.handoff, role="prefill"), kv_events_config=None)
                with self._pool() as other:
                    if config.data_parallel_size > 1:
                        with shared_pair(config, prefill, (pool, other)) as pools:
                            yield SharedBehindPrefill(pools, tokenizer)
                    else:
                        with Pair(config, prefill, (pool, other)) as pair:
                            yield BehindPrefill(pair, tokenizer)
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
