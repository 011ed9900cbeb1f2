"""One engine of a simulated cluster: step loop, handoffs and KV workers, on the real code but for model and sockets."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from engine.clock import Clock
from engine.config import EngineConfig
from engine.core.block_pool import BlockObserver, BlockPool
from engine.core.door.kernel import ModelLimits
from engine.core.door.part import Part
from engine.core.engine import EngineCore
from engine.core.mail.mail import Mail
from engine.core.mail.ranks import Ranks
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.costs.block_usage import observe_usage
from engine.costs.step_cost import StepTimes
from engine.distributed.no_broadcaster import NoBroadcaster
from engine.distributed.tp_group import TPGroup
from engine.errors import EngineUnavailable
from engine.kv_transfer.endpoint import HandoffEndpoint
from engine.kv_transfer.protocol.messages import (
    Attach,
    DropSource,
    Envelope,
    KVWorkerCommand,
    Read,
    ReadEnded,
    StopRead,
)
from engine.kv_transfer.protocol.protocol import HandoffProtocol
from engine.model.kv_groups import KVCacheSpec
from engine.options.handoff import HandoffConfig
from engine.options.speculation import SpeculativeConfig
from engine.parts.costs.cost_accounts import CostAccounts
from engine.parts.costs.cost_ledger import CostLedger
from engine.parts.grammar.grammar_courier import GrammarCourier
from engine.parts.grammar.grammars import Grammars
from engine.parts.handoffs.handoff_courier import HandoffCourier
from engine.parts.handoffs.handoffs import Handoffs, compute_seconds
from engine.parts.handoffs.remote_prefill_policy import RemotePrefillPolicy
from engine.parts.holds.hold_courier import HoldCourier
from engine.parts.holds.holds import Holds
from engine.parts.images.encoder_cache_manager import EncoderCacheManager
from engine.parts.images.image_courier import ImageCourier
from engine.parts.kept import adapter_of, source_of
from engine.parts.kv_check.kv_check import KVCheck
from engine.parts.kv_check.kv_check_courier import HiddenChecks, KVCheckCourier
from engine.parts.kv_fetching.kv_fetching import KVFetching
from engine.parts.kv_groups.kv_cache_groups import kv_cache_of
from engine.parts.kv_tiers.tier_courier import TierCourier
from engine.parts.lora.adapter_courier import AdapterCourier
from engine.parts.lora.adapter_slots import AdapterSlots
from engine.parts.pooling.pooling import Pooling
from engine.parts.speculation.speculator import Speculator
from engine.parts.stages.micro_batches import MicroBatches
from engine.runner.launcher import Launcher
from engine.serving.endpoint import EngineEndpoint
from engine.spec_decode.ngram import NgramDrafter
from engine.wire.handoff import Failed, HandoffAction, HandoffEvent, OpenHandoff, Received
from engine.wire.messages import Command, Subscribe, kinds_of
from engine.wire.parts.pooling import SupportedTasks
from engine.wire.remote_request import Peer
from engine.wire.stats.handoff_stats import Role
from tests.days.adapter_loader import Loader
from tests.days.grammars import FakeCompiler, Pauses
from tests.days.model import EOS, VOCAB, Memory, Runner, StepClock, chain, origin_of
from tests.days.tiers import Tiers, make_offloading

if TYPE_CHECKING:
    from tests.days.cluster import Cluster

WAKE_S = 0.00005  # until a thread runs that has been woken
POLL_S, MAX_POLL_S = 0.005, 0.1  # between turns that do nothing: more and more, since they cost as much as others
TOGETHER_S = 0.5  # between the status and the update of an idle engine, so that they come in one turn
COMMAND: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(kinds_of(Command))
ENVELOPE = msgspec.msgpack.Decoder(Envelope)
WORKER_COMMAND: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(KVWorkerCommand)


class Report(bytes):
    """A message of an engine. live: the requests that it had then, if the message goes to a router."""

    live: frozenset[str] = frozenset()


class Names(BlockObserver):
    """Records which KV a block must have, by its name in the prefix cache."""

    def __init__(
        self, named_kv: dict[bytes, list[int]], size: int, kv_of: Callable[[Request, int, int, int], list[int]]
    ):
        self._named_kv, self._size, self._kv_of = named_kv, size, kv_of

    def describe(self, request: Request, first: int, end: int) -> None:
        size, named_kv = self._size, self._named_kv
        names = request.hashes(end, size) if first < end else []
        for index in range(first, end):
            before = named_kv[names[index - 1]][-1] if index else origin_of(adapter_of(request))
            named_kv[names[index]] = self._kv_of(request, index * size, (index + 1) * size, before)


@dataclass(eq=False)
class RunningRead:
    command: Read
    done: int = 0
    stopping: bool = False


class Engine:
    """An engine process. What it sends while it is ahead of the world leaves when the world has caught up."""

    make_runner: type[Runner] = Runner
    whole_images = 0  #: tokens of an image, all of which one step must compute; 0 if images may be divided

    def __init__(
        self,
        cluster: Cluster,
        engine_id: str,
        node: str,
        config: EngineConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        overlap: bool,
        drift: float,
        status_to: str,
    ):
        self.cluster, self.engine_id, self.node, self.loop = cluster, engine_id, node, cluster.loop
        self.rng = random.Random(cluster.rng.getrandbits(64))
        self.alive, self.paused, self.address = True, False, f"engine:{engine_id}"
        self.reads_go_on = True  #: whether its KV workers read, even while the rest is paused
        self.inbox: deque[bytes] = deque()
        self.outbox: list[Callable[[], None]] = []
        self._turn: Any = None
        self._released, self._release_at = True, 0.0
        self._fruitless = 0  # turns one after the other that have done nothing
        self.clock = StepClock(self.loop.time, drift, self.rng.uniform(0, 1000))
        clock = Clock(self.clock.monotonic, self.clock.world)
        self.named_kv = self.names()
        self.runner = self.make_runner(
            config,
            num_blocks,
            max_model_len,
            self.clock,
            overlap=overlap,
            stages=cluster.size.stages,
            step_s=cluster.size.step_s,
        )
        assert config.handoff is not None
        self.channel = Channel(self, config.handoff, f"channel:{engine_id}", self.runner, clock)
        self.channels, self.image_channel = [self.channel], None
        times = StepTimes()
        size = config.block_size
        kv_cache, _ = kv_cache_of(
            [KVCacheSpec(num_kv_heads=1, head_dim=16, window=None)], [BlockPool(num_blocks, size, True)], 1000,
            least_chunk=max(1, self.whole_images),
        )  # fmt: skip
        handoff = config.handoff
        policy = None
        if handoff.role == "decode":
            policy = RemotePrefillPolicy(handoff, times.by_tokens)
        role: Role | None = "decode" if policy and handoff.switch_roles else None
        handoffs = Handoffs(policy, self.channel.peer, self.fingerprint, role, "bits" if cluster.size.checks else "")
        offloading = make_offloading(cluster.size, kv_cache, times, clock)
        self.tiers = None if offloading is None else Tiers(self)
        usages, held, holds = observe_usage(kv_cache), cluster.size.held, None
        if held is not None and handoff.role != "encode":
            holds = Holds(
                kv_cache,
                offloading,
                usages,
                max_model_len=max_model_len,
                max_share=held.share,
                max_share_per_client=held.share_per_client,
                max_ttl_s=config.max_hold_s,
            )
        fetching = None
        if handoff.enable_prefix_fetching and handoff.role in ("decode", "replica"):
            fetching = KVFetching(
                kv_cache,
                handoffs,
                offloading,
                peer=self.channel.peer,
                times=times,
                timeout_s=handoff.fetch_timeout_s,
                block_bytes=[size * 1000],
                min_tokens=size,
            )
        self.loader = adapters = None
        if cluster.size.adapters and handoff.role != "encode":
            self.loader, adapters = Loader(self), AdapterSlots(cluster.size.adapters)
        check = None
        if cluster.size.checks and handoff.role != "encode":
            check = KVCheck(cluster.size.checks, config.max_num_batched_tokens, adapters)
            check.listen_to(offloading, fetching, handoffs)
        stages, speculation = cluster.size.stages, list[Part]()
        if cluster.size.drafts:
            drafting = SpeculativeConfig(method="ngram")
            speculation = [Speculator(drafting, NgramDrafter(1, 3), times.drafting.of, VOCAB, stages=stages)]
        scheduler = Scheduler(
            config,
            kv_cache,
            limits=ModelLimits(max_model_len, VOCAB, frozenset({EOS}), longest_span=self.whole_images),
            parts=[
                Pooling(SupportedTasks()),
                (grammars := Grammars()),
                CostAccounts(),
                *(part for part in (holds, offloading, fetching) if part is not None),
                *([MicroBatches(stages, self.whole_images)] if stages > 1 else []),
                *self.make_images(config, clock),
                *speculation,
                *([] if adapters is None else [adapters]),
                handoffs,
                *([] if check is None else [check]),
            ],
            compute_s=compute_seconds(times, handoffs),
        )
        kv_cache.pool.observers.append(Names(self.named_kv, size, self.kv_of))
        self.core = EngineCore(
            config,
            SimpleNamespace(supported_tasks=SupportedTasks(), head="lm", vocab_size=VOCAB),  # type: ignore[arg-type]
            ranks=Ranks(
                TPGroup.single(),
                runner=self.runner,  # type: ignore[arg-type]
                launcher=Launcher(self.runner),  # type: ignore[arg-type]
                broadcaster=NoBroadcaster(),
                marks=[],
            ),
            scheduler=scheduler,
            observers=[
                times,
                CostLedger(
                    times,
                    usages,
                    [size * 1000],
                    clock.monotonic(),
                    [] if offloading is None else [usage for tier in offloading.tiers for usage in tier.usages],
                ),
                HiddenChecks(),
            ],
            mail=Mail(
                scheduler,
                [
                    GrammarCourier(
                        grammars,
                        FakeCompiler(random.Random(self.rng.getrandbits(64))),  # type: ignore[arg-type]
                    ),
                    *([] if offloading is None else [TierCourier(offloading, self.tiers)]),  # type: ignore[arg-type]
                    HoldCourier(None if fetching is None else fetching.peer),
                    *(
                        [ImageCourier(self.image_channel, images)]
                        if self.image_channel is not None and (images := scheduler.parts.get(EncoderCacheManager))
                        else []
                    ),
                    *([] if adapters is None else [AdapterCourier(adapters, self.loader)]),  # type: ignore[arg-type]
                    HandoffCourier(self.channel, handoffs),  # type: ignore[arg-type]
                    *([] if check is None else [KVCheckCourier(check, self.runner, 1, NoBroadcaster())]),  # type: ignore[arg-type]
                ],
                Pauses(self.clock),  # type: ignore[arg-type]
            ),
            clock=clock,
        )
        self.endpoint = EngineEndpoint(
            self.core, self, engine_id=engine_id, address=self.address, status_to=status_to, clock=clock
        )
        for channel in self.channels:
            channel.serve()
        self.wake()

    # -- what an engine with images does otherwise (encoders.py) ---------------------------------------------

    fingerprint = "print"

    def names(self) -> dict[bytes, list[int]]:
        """Return where the KV of the blocks in prefix caches is recorded, by the blocks' names."""
        return self.cluster.named_kv

    def kv_of(self, request: Request, start: int, end: int, before: int) -> list[int]:
        """Return the KV that tokens [start, end) must have. before: that of the token before."""
        return chain(request.tokens[start:end], before)

    def make_images(self, config: EngineConfig, clock: Clock) -> list[EncoderCacheManager]:
        return []

    def check(self) -> None:
        """Check the books, after every step."""
        self.core.scheduler.check()

    # -- the step loop -------------------------------------------------------------------------------------

    def take(self, command: bytes) -> None:
        if self.alive:
            self.inbox.append(command)
            self.wake()

    def wake(self) -> None:
        """Take a turn as soon as possible."""
        if self.alive and not self.paused and self._released:
            self._schedule(WAKE_S)

    def _schedule(self, seconds: float) -> None:
        at = self.loop.time() + seconds
        if self._turn is not None:
            if self._turn.when() <= at:
                return
            self._turn.cancel()
        self._turn = self.loop.call_at(at, self._take_turn)

    def _take_turn(self) -> None:
        self._turn = None
        if not self.alive or self.paused:
            return
        news, core, before = self._has_news, self.core, self._progress()
        if core.idle and self._only_renews():
            self._schedule(self._due_s())
            return
        try:
            while self.inbox:
                self.endpoint.handle(COMMAND.decode(self.inbox.popleft()))
            events = core.step()
            self.endpoint.send(events)
        except EngineUnavailable as error:
            self.cluster.note(f"{self.engine_id} ends: {error}")
            self.cluster.seen["an engine ends itself"] += 1
            self.cluster.engine_ended(self, str(error))
            return
        if news or events or self._progress() != before:
            self.check()
            self._fruitless = 0
        else:
            self._fruitless += 1
        self._released, self._release_at = False, self.loop.time() + self.clock.lead
        self.loop.call_at(self._release_at, self._release)

    @property
    def disks_answered(self) -> bool:
        """Whether tiers or adapters have been read or written."""
        return any(disk is not None and disk.answered for disk in (self.tiers, self.loader))

    def _only_renews(self) -> bool:
        """Take the commands that have come if they only renew subscriptions. Returns whether an idle engine has no more
        to do then."""
        if not self.inbox or self.channel.endpoint._events or self.disks_answered:
            return False
        commands = [COMMAND.decode(command) for command in self.inbox]
        if not all(isinstance(command, Subscribe) and not command.resync for command in commands):
            return False
        for command in commands:
            self.endpoint.handle(command)
        self.inbox.clear()
        return all(subscriber.synced for subscriber in self.endpoint._kv_events._subscribers.values())

    @property
    def _has_news(self) -> bool:
        """Whether something has come from outside."""
        return bool(self.inbox or self.disks_answered or any(channel.endpoint._events for channel in self.channels))

    def _progress(self) -> tuple[int, int, int]:
        """Return what changes with every step that does something, besides what comes from outside."""
        return self.core.scheduler.totals.steps, len(self.core._submitted_at), self.core.scheduler.out.num_posted

    def _release(self) -> None:
        """The world has caught up."""
        self.clock.lead = 0.0
        if not self.alive or self.paused or self._released:
            return
        self._released = True
        outbox, self.outbox = self.outbox, []
        for send in outbox:
            send()
        if self._has_news or not (self.core.idle or self._fruitless):
            self._schedule(WAKE_S)
        elif self.core.idle:
            self._schedule(self._due_s())
        else:  # it waits for a grammar or for KV, and polls
            self._schedule(min(self._due_s(), POLL_S * 2 ** min(self._fruitless - 1, 9), MAX_POLL_S))

    def _due_s(self) -> float:
        """Return the seconds until something happens in a turn even if nothing comes from outside. If no request waits,
        the status and the update for the routers may come in one turn, since turns cost time."""
        now, wait_s, core, due = self.clock.monotonic(), self.endpoint.wait_s(), self.core, self.endpoint._status_due
        if wait_s is not None:
            choose = max if core.idle and abs(now + wait_s - due) < TOGETHER_S else min
            due = choose(due, now + wait_s)
        if not core.idle:
            due = min([due, *[pending.ready_at for pending in core.mail[GrammarCourier].running.values()]])
            due = min(due, core.scheduler.next_deadline)
        return max(0.0, due - now) / self.clock.drift + WAKE_S

    # -- Receivers -----------------------------------------------------------------------------------------

    def connect(self, address: str) -> None:
        pass

    def send(self, address: str, message: bytes) -> bool:
        report = Report(message)
        if address.startswith("router:"):
            report.live = frozenset(self.core.scheduler.queue.live)
        self.outbox.append(lambda: self.cluster.send(self.node, self.engine_id, address, report))
        return True

    def forget_unused(self) -> None:
        pass

    # -- faults --------------------------------------------------------------------------------------------

    def pause(self, reads_go_on: bool = False) -> None:
        self.paused, self.reads_go_on = True, reads_go_on

    def resume(self) -> None:
        if self.paused and self.alive:
            self.paused, self.reads_go_on = False, True
            if self._released:
                self.wake()
            elif self.loop.time() >= self._release_at:
                self._release()
            for channel in self.channels:
                channel.resume()

    def die(self) -> None:
        self.alive = False


class Channel:
    """The channel's thread and the KV worker of an engine."""

    def __init__(self, engine: Engine, config: HandoffConfig, address: str, memory: Memory, clock: Clock):
        """memory: what its worker reads into, and others read from."""
        self._engine, self._cluster, self._loop, self._memory = engine, engine.cluster, engine.loop, memory
        self.address = address
        engine.cluster.channels[address] = self
        self.peer = Peer(engine.engine_id, self.address, engine.rng.getrandbits(64))
        self.endpoint = HandoffEndpoint(
            HandoffProtocol(config, self.peer, ranks=[{"fake": b""}], block_size=engine.runner.block_size),
            answers_to="",
            send=self._send,
            command=self._command,
            wake=engine.wake,
            clock=clock,
        )
        self._envelopes: deque[Envelope] = deque()
        self._answers: deque[ReadEnded] = deque()
        self._reads: list[RunningRead] = []
        self._unsafe: dict[str, int] = {}  # handoff -> its tokens whose KV was read while the source held it
        self._timer: Any = None
        self.block_s = self._cluster.size.block_s
        self.quarantined, self.snapshot, self.stats = (
            self.endpoint.quarantined,
            self.endpoint.snapshot,
            self.endpoint.stats,
        )
        self.refused_by_ranks = self.endpoint.refused_by_ranks

    def events(self) -> list[HandoffEvent]:
        """Check that no KV is kept that its source no longer held when it was read, and that no handoff fails because
        of a few messages that are lost."""
        events = self.endpoint.events()
        for event in events:
            if isinstance(event, Received):
                assert event.handoff_id not in self._unsafe, "KV is taken that was not held while it was read"
            elif isinstance(event, Failed):
                safe = self._unsafe.pop(event.handoff_id, event.verified)
                assert event.verified <= safe, "KV is kept that was not held while it was read"
                request = self._engine.core.scheduler.parts[Handoffs].remote.receiving.get(event.handoff_id)
                moves = request is not None and source_of(request) is not None
                if self._cluster.only_losses and (event.reason == "silent" or moves):
                    assert event.reason not in ("silent", "not_accepted"), "a lost message is not repeated"
        return events

    def submit(self, *actions: HandoffAction) -> None:
        def submit() -> None:
            for action in actions:
                for block in action.blocks if isinstance(action, OpenHandoff) else ():
                    used_until = self._memory.used_until(block)
                    assert used_until <= self._loop.time() + 1e-9, "KV is asked for while a step uses its block"
            self.endpoint.submit(*actions)
            self._soon()

        self._engine.outbox.append(submit)

    @property
    def node(self) -> str:
        return self._engine.node

    def receive(self, data: bytes) -> None:
        if self._engine.alive:
            self._envelopes.append(ENVELOPE.decode(data))
            self._soon()

    def resume(self) -> None:
        self._soon()
        for read in self._reads:
            self._go_on(read)

    def serve(self) -> None:
        self._timer = None
        if not self._engine.alive or self._engine.paused:
            return
        lead, self._engine.clock.lead = self._engine.clock.lead, 0.0  # this thread is not ahead
        answers, self._answers = self._answers, deque()
        envelopes, self._envelopes = self._envelopes, deque()
        self.endpoint.serve(answers, envelopes)
        due = self._due()
        wait_s = None if due is None else max(0.0, due - self._engine.clock.monotonic()) / self._engine.clock.drift
        self._engine.clock.lead = lead
        if wait_s is not None:
            self._at(wait_s + 0.001)

    def _due(self) -> float | None:
        """Return when `serve` has something to do even if nothing comes. The real thread looks every second besides."""
        protocol = self.endpoint._protocol
        times = [until for _, _, until in protocol._released.values()]
        times += [*protocol._quarantined.values(), *protocol._idle_sources.values()]
        times = [at for at in times if at < inf]
        if protocol.due is not None:
            times.append(protocol.due)
        return min(times, default=None)

    def _soon(self) -> None:
        self._at(WAKE_S)

    def _at(self, seconds: float) -> None:
        at = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(at, self.serve)

    def _send(self, address: str, data: bytes) -> None:
        self._cluster.send_envelope(self._engine.node, address, data)

    # -- the KV worker: reads are one-sided, so it does not matter whether the source is paused --------------

    def _command(self, data: bytes) -> None:
        command = WORKER_COMMAND.decode(data)
        if isinstance(command, Read):
            self._reads.append(read := RunningRead(command))
            self._go_on(read)
        elif isinstance(command, StopRead | DropSource):
            for read in self._reads:
                named = read.command.read_id, read.command.source_epoch
                if getattr(command, "read_id", None) == named[0] or getattr(command, "source_epoch", None) == named[1]:
                    read.stopping = True
                    self._loop.call_later(self.block_s, self._step, read, read.done)
        else:
            assert isinstance(command, Attach)

    def _go_on(self, read: RunningRead) -> None:
        seconds = self.block_s * self._engine.rng.uniform(0.5, 2.0)
        if self._engine.rng.random() < self._cluster.size.stalls:
            seconds += self._engine.rng.uniform(0, self._cluster.size.lease_s * 0.45)
        self._loop.call_later(seconds, self._step, read, read.done)

    def _step(self, read: RunningRead, done: int) -> None:
        engine, command, now = self._engine, read.command, self._loop.time()
        if not engine.alive or not engine.reads_go_on or read not in self._reads or read.done != done:
            return
        source = self._cluster.engine_of_epoch(command.source_epoch)
        if read.stopping:
            self._end(read, "stopped")
        elif source is None:
            self._end(read, "connection lost")
        elif (until := self._cluster.network.healed_at(engine.node, source.node)) > now:
            if until - now > 5.0:  # the transport gives up
                self._loop.call_later(5.0, self._end, read, "nothing came for 5 s")
            else:
                self._loop.call_at(until, self._step, read, done)
        elif done < len(command.source_blocks):
            if not source.alive:
                raise AssertionError
            kv = source.runner.read(command.source_blocks[done], now)
            self._memory.write(command.local_blocks[done], kv, now)
            read.done += 1
            if read.done < len(command.source_blocks):
                self._go_on(read)
            else:
                self._end(read, None)
        else:
            self._end(read, None)

    def _end(self, read: RunningRead, error: str | None) -> None:
        if read in self._reads:
            self._reads.remove(read)
            if error is None:
                self._check_lease(read.command)
            self._answers.append(ReadEnded(read.command.read_id, 0, "fake", read.done, 0.0, error))
            self._soon()

    def _check_lease(self, command: Read) -> None:
        """Record whether the source still holds the blocks that have just been read."""
        handoff = self.endpoint._protocol._reads[command.read_id]
        source, asked = self._cluster.engine_of_epoch(command.source_epoch), handoff.remote_request
        if source is None:
            return
        held = source.channel.endpoint._protocol.prefill_handoffs.get(asked.handoff_id)
        if held is None or held.lease != handoff.lease:
            read = handoff.receive_state.read * source.core.config.block_size
            self._unsafe.setdefault(asked.handoff_id, asked.skip + read)
            self._cluster.seen["read without a lease"] += 1
