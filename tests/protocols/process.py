"""One engine of the explored cluster: the real HandoffProtocol in the modelled engine of the handoff tests, with
nothing around it. What it does depends only on what was done with it before, so a list of inputs is a state."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from types import SimpleNamespace
from typing import Any

import msgspec

from engine.kv_transfer.protocol.messages import Envelope, Released
from engine.options.handoff import HandoffConfig
from engine.wire.handoff import Failed
from engine.wire.remote_request import Peer, RemoteRequest
from tests.engine.kv_transfer.handoff_world import BLOCK, Engine, names_of

# Times are short, so that few ticks reach every deadline
CONFIG = HandoffConfig(role="decode", lease_s=5.0, heartbeat_s=1.0, progress_s=2.0, accept_s=3.0)
LONG_S = 100.0  # longer than everything that an engine waits for or remembers
LOST = "lost"  # in place of what a block holds: its engine is not there any more
CHUNK = 6  # tokens of a prompt that are computed at a time: not whole blocks
OTHERS = object()  # somebody else's KV

Input = tuple[Any, ...]  # what is done, and with what


@dataclass(frozen=True)
class Prompt:
    """A prompt that any of some engines may compute for another. Its request may arrive at all of them, repeatedly."""

    decode: str
    prefills: tuple[str, ...]
    num_blocks: int = 2
    skip: int = 0  #: blocks


@dataclass(frozen=True)
class Move:
    """A request that stops in one engine, and that each of some others may claim."""

    holder: str
    claimants: tuple[str, ...]
    num_blocks: int = 2
    skip: int = 0


@dataclass(frozen=True)
class Fetch:
    """Blocks that one engine asks another for, which had the first `cached` of them."""

    decode: str
    holder: str
    num_blocks: int = 2
    cached: int = 2
    skip: int = 0


Ask = Prompt | Move | Fetch


@dataclass(frozen=True)
class Scope:
    """What is explored. limits: how often each engine does what it may do only so often: `tick` at the time that its
    protocol asks for; `sleep`, longer than it remembers anything; `die`, and start again; `cancel` one of its handoffs;
    `refuse` what it has accepted; `read fails`; `call fails`; `lose` what it has cached."""

    engines: tuple[str, ...]
    asks: tuple[Ask, ...]
    limits: tuple[tuple[str, int], ...]
    num_blocks: int = 4  #: of each engine
    accepts: int = 1  #: how often an engine accepts one request

    def tokens(self, number: int) -> list[int]:
        return [1000 * (number + 1) + i for i in range(self.asks[number].num_blocks * BLOCK)]


class Held(msgspec.Struct, frozen=True, tag=True):
    """Tells a claimant where a request is held: what an ingress does."""

    number: int
    source: Peer


Payload = Envelope | RemoteRequest | Held


@dataclass
class Alone:
    """In place of the World around an Engine. source: the engine that the next step of a read reads from."""

    epochs: count[int]
    ids: count[int] = field(default_factory=lambda: count(1))
    now: float = 0.0
    network: list[Any] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    source: Any = None

    def by_epoch(self, _: int) -> Any:
        return self.source


class Process:
    """An engine, and how often it may still do what is limited."""

    def __init__(self, scope: Scope, name: str):
        self._scope, self.name = scope, name
        self.left, self._begun, self._accepted = Counter(dict(scope.limits)), set[int](), Counter[str]()
        self.starts = 0
        self.sent: list[tuple[str, Payload]] = []  #: to whom, and what
        self._start()

    def _start(self) -> None:
        epoch = 10 * self._scope.engines.index(self.name) + self.starts + 1
        self._world = Alone(count(epoch))
        self.engine = Engine(self._world, self.name, num_blocks=self._scope.num_blocks, config=CONFIG)  # type: ignore[arg-type]
        for number, ask in enumerate(self._scope.asks):
            if isinstance(ask, Fetch) and ask.holder == self.name:
                self.engine.cache(self._scope.tokens(number)[: ask.cached * BLOCK])

    def inputs(self) -> Iterator[Input]:
        """Yield what this engine may do by itself now, but for its reads."""
        engine, left, protocol = self.engine, self.left, self.engine.protocol
        for number, ask in enumerate(self._scope.asks):
            name, fits = str(number), ask.num_blocks - ask.skip <= len(engine.free)
            begins = {Prompt: "open", Move: "hold", Fetch: "fetch"}[type(ask)]
            if number not in self._begun and self.name == _beginner(ask) and (fits or begins == "hold"):
                yield begins, number
            if name in engine.opened:
                if left["cancel"]:
                    yield "cancel", number
                if left["call fails"] and isinstance(ask, Prompt):
                    yield "call fails", number
            if name in engine.jobs:
                if engine.jobs[name].computed < len(self._scope.tokens(number)):
                    yield "compute", number
                if left["refuse"] and protocol.prefill_handoffs[name].state != "refused":
                    yield "refuse", number
        if engine.asked:
            yield ("answer",)
        if engine.answers:
            yield ("hear",)
        if engine.cached and left["lose"]:
            yield ("lose",)
        if left["tick"]:
            yield ("tick",)
        if left["sleep"]:
            yield ("sleep",)
        if left["die"]:
            yield ("die",)
        for index, read in enumerate(engine.reads):
            if left["read fails"] and not read.stopping:
                yield "read fails", index

    def do(self, what: str, *args: Any) -> None:
        """Carry out an input. What is sent then is in `sent`."""
        engine, scope, protocol = self.engine, self._scope, self.engine.protocol
        if what in self.left:
            self.left[what] -= 1
        self.sent = []
        match what:
            case "open":
                ask, number = scope.asks[args[0]], args[0]
                assert isinstance(ask, Prompt)
                asked = engine.open(scope.tokens(number), ask.skip * BLOCK, handoff_id=str(number))
                self.sent += [(prefill, asked) for prefill in ask.prefills]
            case "hold":
                ask, number = scope.asks[args[0]], args[0]
                assert isinstance(ask, Move)
                if engine.hold(scope.tokens(number), handoff_id=str(number)) is not None:
                    self.sent += [(claimant, Held(number, engine.peer)) for claimant in ask.claimants]
            case "fetch":
                ask, number = scope.asks[args[0]], args[0]
                assert isinstance(ask, Fetch)
                tokens, epoch = scope.tokens(number), 10 * scope.engines.index(ask.holder) + 1
                source = Peer(ask.holder, f"tcp://{ask.holder}", epoch)
                names = [b"".join(names_of(tokens)[ask.skip :])]
                engine.open(tokens, ask.skip * BLOCK, source, names, handoff_id=str(number))
            case "cancel":
                engine.cancel(str(args[0]))
            case "call fails":
                engine.remote_prefill_failed(str(args[0]))
            case "compute":
                engine.compute(str(args[0]), CHUNK)
            case "refuse":
                engine.refuse(str(args[0]))
            case "answer":
                engine.answer()
            case "hear":
                engine.hear_worker()
            case "lose":
                engine.lose(1)
            case "tick":
                due = protocol.due
                self._world.now = self._world.now + CONFIG.heartbeat_s if due is None else max(self._world.now, due)
                engine.tick()
            case "sleep":
                self._world.now += LONG_S
                engine.tick()
            case "die":
                self.starts += 1
                self._start()
            case "read":
                self._read(*args)
            case "read fails":
                engine.read_step(engine.reads[args[0]], error="no progress")
            case "deliver":
                self._deliver(args[0])
        if what in ("open", "hold", "fetch"):
            self._begun.add(args[0])
        for result in engine.results.values():
            is_liar = isinstance(result, Failed) and result.reason in ("protocol", "prompt_hash")
            assert not is_liar, f"an engine is said to contradict itself: {result}"
        for flight in self._world.network:
            self.sent.append((flight.address.removeprefix("tcp://"), _plain(flight.envelope)))
        self._world.network.clear()

    def _deliver(self, payload: Payload) -> None:
        engine = self.engine
        if isinstance(payload, Envelope):
            engine.protocol.receive(payload, engine.now)
            engine.flush()
        elif isinstance(payload, RemoteRequest):
            name = payload.handoff_id
            if name not in engine.jobs and self._accepted[name] < self._scope.accepts:
                self._accepted[name] += 1
                engine.accept(payload)
        elif payload.number not in self._begun:
            ask, tokens = self._scope.asks[payload.number], self._scope.tokens(payload.number)
            if ask.num_blocks - ask.skip <= len(engine.free):
                self._begun.add(payload.number)
                engine.open(tokens, ask.skip * BLOCK, payload.source, handoff_id=str(payload.number))

    # -- reads ---------------------------------------------------------------------------------------------

    def reads(self) -> list[tuple[int, int] | None]:
        """Return what each running read reads next: epoch and block of its source; None if it only has to end."""
        return [
            None
            if read.stopping or read.done == len(read.command.source_blocks)
            else (read.command.source_epoch, read.command.source_blocks[read.done])
            for read in self.engine.reads
        ]

    def memory(self) -> dict[int, Hashable]:
        """Return what others see in this engine's blocks."""
        return {block: OTHERS if type(kv) is object else kv for (_, block), kv in self.engine.memory.items()}  # type: ignore[misc]

    def _read(self, index: int, content: Hashable) -> None:
        read = self.engine.reads[index]
        block = [*read.command.source_blocks, 0][read.done]
        self._world.source = None if content == LOST else SimpleNamespace(memory={(0, block): content})
        self.engine.read_step(read)

    # -- what must hold ------------------------------------------------------------------------------------

    def end_alone(self) -> None:
        """Let nothing arrive any more. Check that all handoffs end all the same, and give back their blocks."""
        engine, protocol = self.engine, self.engine.protocol
        engine.lose(engine.num_blocks)
        for _ in range(100):
            for read in list(engine.reads):
                self._world.source = None
                engine.read_step(read)
            while engine.answers:
                engine.hear_worker()
            while engine.asked:
                engine.answer()
            if protocol.due is None:
                break
            self._world.now = max(self._world.now, protocol.due)
            engine.tick()
        assert not protocol.broken, "an engine ends for nothing"
        assert not protocol.decode_handoffs and not engine.opened, "a handoff never ends"
        assert not protocol.prefill_handoffs and not engine.jobs, "a lease never ends"
        assert len(engine.free) == engine.num_blocks, "a block is lost"

    def pass_time(self, seconds: float) -> bool:
        """Let time pass. Returns whether the protocol asks for a tick now."""
        self._world.now += seconds
        due = self.engine.protocol.due
        return due is None or due <= self._world.now

    @property
    def is_patient(self) -> bool:
        """Whether so little time has passed that a handoff bears what was lost meanwhile."""
        counts = Counter(dict(self._scope.limits))
        return self.left["sleep"] == counts["sleep"] and self.left["tick"] >= counts["tick"] - 1

    def digest(self) -> Hashable:
        """Return what the future of this engine depends on."""
        return (
            _canonical(self.engine, self.engine.now), self.starts, frozenset(self.left.items()),
            frozenset(self._begun), frozenset(self._accepted.items()),
        )  # fmt: skip


def _beginner(ask: Ask) -> str:
    return ask.holder if isinstance(ask, Move) else ask.decode


def _plain(envelope: Envelope) -> Envelope:
    """Return the message without the exact cost of the time that the blocks were held."""
    message = envelope.message
    if isinstance(message, Released) and message.byte_ns:
        return msgspec.structs.replace(envelope, message=msgspec.structs.replace(message, byte_ns=1.0))
    return envelope


# Attributes on which nothing depends but statistics, those of the model around the protocol, and its surroundings
UNSEEN = {
    "counters", "lines", "opened_at", "accepted_at", "_accepted_at", "_first_at", "_released_at", "_finished_at",
    "_cost_at_ns", "num_bytes", "_num_bytes", "sent", "outcomes", "world", "config", "_config", "out", "_out", "drift",
    "offset", "name", "num_ranks",
}  # fmt: skip


def _canonical(value: Any, now: float) -> Hashable:
    """Return something that is equal for equal objects. Numbers with a point are times, relative to now."""
    kind = type(value)
    if kind in (int, str, bytes, bool) or value is None:
        return value  # type: ignore[no-any-return]
    if kind is float:
        return round(value - now, 3)
    if kind is object:
        return "others'"
    if isinstance(value, msgspec.Struct):
        return msgspec.msgpack.encode(value)
    if isinstance(value, list | tuple | deque):
        return tuple([_canonical(each, now) for each in value])
    if isinstance(value, set | frozenset):
        return frozenset([_canonical(each, now) for each in value])
    if isinstance(value, dict):
        return frozenset([(_canonical(key, now), _canonical(each, now)) for key, each in value.items()])
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, count):
        return repr(value)
    if callable(value):
        return None
    names = list(vars(value)) if hasattr(value, "__dict__") else kind.__slots__
    told = [(name, getattr(value, name)) for name in names if name not in UNSEEN]
    return tuple([(name, frozenset(each) if name == "results" else _canonical(each, now)) for name, each in told])
