"""Explores all that a few engines can do with their handoffs, in every order.

**The network** only grows: a message that was sent can arrive at any later time, any number of times, or never. That
is loss, repetition and reordering at once. A state with more messages can do all that the same state with fewer can, so
one is left out if another with the same engines and at least its messages was seen.

**An engine** is a number: that of its state (`Process.digest`). What an input does to it is computed once, by the real
protocol, and looked up wherever the engine gets into the same state again. A read is an input with what the source's
block holds at that time. An engine that is stopped is one that nothing happens to for a while.

**Orders that do not matter** are left out with sleep sets (Godefroid): inputs of two engines commute, but for a read
and what its source does.

Whenever an engine gets into a new state, it is once left alone, and some states of all engines go on once without
losses (recovery.py): then all must end, and end well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import msgspec

from engine.kv_transfer.protocol.messages import Envelope
from engine.wire.remote_request import RemoteRequest
from tests.protocols.process import LOST, Input, Payload, Process, Scope
from tests.protocols.recovery import check_recovery

RECOVER_FIRST, RECOVER_EVERY = 300, 16  # states of all engines: these, and a share of the others
Locals = tuple[int, ...]  # states of the engines
Action = tuple[int, Hashable]  # engine, and what is done with it


@dataclass(slots=True)
class Known:
    """A state of all engines that was reached. net: the messages that were sent, as bits. sleep: actions that need not
    follow, since another order has the same effect."""

    net: int
    sleep: frozenset[int]
    number: int


class Violation(AssertionError):
    """Something that must hold does not. Its text lists what led there."""


@dataclass(slots=True)
class Local:
    """A state of one engine."""

    path: tuple[Input, ...]  #: inputs that lead there
    inputs: list[Hashable]
    reads: list[tuple[int, int] | None]
    memory: dict[int, Hashable]
    epoch: int
    idle: int = 0  #: messages that change nothing here, as bits
    after: dict[Hashable, tuple[int, int]] = field(default_factory=dict)  #: input -> next state, messages sent


@dataclass
class Found:
    """is_whole: whether all states were visited. depth: inputs to the furthest one."""

    states: int = 0
    transitions: int = 0
    repeated: int = 0  #: transitions into states that were known, or could do less than a known one
    asleep: int = 0  #: transitions that were left out, since another order has the same effect
    local_states: int = 0
    messages: int = 0
    depth: int = 0
    is_whole: bool = True

    def __str__(self) -> str:
        end = "whole" if self.is_whole else f"bounded, depth {self.depth}"
        return (
            f"states={self.states} transitions={self.transitions} repeated={self.repeated} asleep={self.asleep} "
            f"local_states={self.local_states} messages={self.messages} depth={self.depth} {end}"
        )


class Explorer:
    def __init__(self, scope: Scope):
        self.scope = scope
        self._locals: list[Local] = []
        self._numbers: dict[tuple[int, Hashable], int] = {}  # local states by engine and digest
        self._messages: list[Payload] = []
        self._message_numbers: dict[tuple[str, bytes], int] = {}
        self._to = [0] * len(scope.engines)  # messages to each engine, as bits
        self._actions: dict[tuple[int, Hashable, int], int] = {}  # by engine, input, and the engine that is read
        self._action_of: list[Action] = []
        self._touches: list[int] = []  # engines that an action has to do with, as bits

    def explore(self, most: int = 10**9) -> Found:
        """Visit all states, those with the shortest way first, or `most` of them. Raises Violation."""
        found = Found()
        first = tuple(self._enter(i, Process(self.scope, name), ()) for i, name in enumerate(self.scope.engines))
        #: engines -> for each known state with them: its messages, its sleep set and its number
        known: dict[Locals, list[Known]] = {first: [Known(0, frozenset(), 0)]}
        ways = [(-1, -1, 0)]  # to each state: the state before, the action, and the number of actions
        queue: deque[tuple[Locals, Known, frozenset[int] | None]] = deque([(first, known[first][0], None)])
        while queue:
            locals_, state, todo = queue.popleft()
            net, asleep = state.net, set(state.sleep)
            found.depth = ways[state.number][2]
            for action in self._enabled(locals_, net):
                if action in asleep or (todo is not None and action not in todo):
                    found.asleep += 1
                    continue
                engine, what = self._action_of[action]
                try:
                    next_local, sent = self._step(engine, locals_[engine], what)
                    after = (*locals_[:engine], next_local, *locals_[engine + 1 :])
                    if after not in known:
                        self._recover(after, len(known))
                except AssertionError as error:
                    raise Violation(self._told(ways, state.number, action, error)) from error
                if next_local == locals_[engine] and not sent & ~net:
                    continue
                found.transitions += 1
                sleep = frozenset([each for each in asleep if self.commutes(each, action)])
                asleep.add(action)
                of_locals = known.setdefault(after, [])
                if (same := next((each for each in of_locals if not (net | sent) & ~each.net), None)) is None:
                    if len(ways) == most:
                        found.is_whole = False
                        continue
                    new = Known(net | sent, sleep, len(ways))
                    of_locals.append(new)
                    ways.append((state.number, action, ways[state.number][2] + 1))
                    queue.append((after, new, None))
                    continue
                found.repeated += 1
                if not same.sleep <= sleep:  # what was left out there has to be made up for
                    queue.append((after, same, same.sleep - sleep))
                    same.sleep &= sleep
        found.states, found.local_states, found.messages = len(ways), len(self._locals), len(self._messages)
        return found

    def commutes(self, one: int, other: int) -> bool:
        """Whether two actions have the same effect in either order."""
        return not self._touches[one] & self._touches[other]

    # -- what can happen -----------------------------------------------------------------------------------

    def _enabled(self, locals_: Locals, net: int) -> Iterator[int]:
        for engine, number in enumerate(locals_):
            local = self._locals[number]
            for what in local.inputs:
                yield self._action(engine, what)
            for index, wanted in enumerate(local.reads):
                source, content = self._content(locals_, wanted)
                yield self._action(engine, ("read", index, content), source)
            arriving = net & self._to[engine] & ~local.idle
            while arriving:
                message = arriving & -arriving
                arriving ^= message
                yield self._action(engine, message.bit_length() - 1)

    def _content(self, locals_: Locals, wanted: tuple[int, int] | None) -> tuple[int, Hashable]:
        """Return the engine from which a block is read, as a bit, and what the block holds."""
        if wanted is None:
            return 0, None
        epoch, block = wanted
        source = epoch // 10
        local = self._locals[locals_[source]]
        return 1 << source, local.memory.get(block) if local.epoch == epoch else LOST

    def _action(self, engine: int, what: Hashable, source: int = 0) -> int:
        if (found := self._actions.get((engine, what, source))) is None:
            found = self._actions[engine, what, source] = len(self._action_of)
            self._action_of.append((engine, what))
            self._touches.append(1 << engine | source)
        return found

    # -- single engines --------------------------------------------------------------------------------------

    def _step(self, engine: int, number: int, what: Hashable) -> tuple[int, int]:
        """Return the state of an engine after an input, and the messages that it sends, as bits."""
        local = self._locals[number]
        if (known := local.after.get(what)) is not None:
            return known
        is_message = isinstance(what, int)
        done: Input = ("deliver", self._messages[what]) if isinstance(what, int) else what  # type: ignore[assignment]
        process = self._process(engine, local.path)
        process.do(*done)
        sent = 0
        for name, payload in process.sent:
            sent |= 1 << self._message(name, payload)
        after = self._enter(engine, process, (*local.path, done))
        if is_message and after == number and not sent:
            local.idle |= 1 << what  # type: ignore[operator]
        local.after[what] = after, sent
        return after, sent

    def _process(self, engine: int, path: tuple[Input, ...]) -> Process:
        process = Process(self.scope, self.scope.engines[engine])
        for done in path:
            process.do(*done)
        return process

    def _enter(self, engine: int, process: Process, path: tuple[Input, ...]) -> int:
        """Return the number of a state. A new one is left alone once, to see that everything ends."""
        key = engine, process.digest()
        if (number := self._numbers.get(key)) is None:
            number = self._numbers[key] = len(self._locals)
            inputs: list[Hashable] = list(process.inputs())
            epoch = process.engine.peer.epoch
            self._locals.append(Local(path, inputs, process.reads(), process.memory(), epoch))
            process.end_alone()
        return number

    def _message(self, name: str, payload: Payload) -> int:
        key = name, msgspec.msgpack.encode(payload)
        if (number := self._message_numbers.get(key)) is None:
            number = self._message_numbers[key] = len(self._messages)
            self._messages.append(payload)
            self._to[self.scope.engines.index(name)] |= 1 << number
        return number

    def _recover(self, locals_: Locals, number: int) -> None:
        """Let the first states, and some of the others, go on without losses."""
        if number < RECOVER_FIRST or number % RECOVER_EVERY == 0:
            check_recovery([self._process(i, self._locals[local].path) for i, local in enumerate(locals_)])

    # -- what is told of a violation -------------------------------------------------------------------------

    def _told(self, ways: list[tuple[int, int, int]], way: int, action: int, error: AssertionError) -> str:
        actions = [action]
        while ways[way][0] >= 0:
            actions.append(ways[way][1])
            way = ways[way][0]
        lines = [self._line(*self._action_of[each]) for each in reversed(actions)]
        return "\n".join([str(error).split("\n")[0] or "an assertion fails", *lines])

    def _line(self, engine: int, what: Hashable) -> str:
        text = str(what)
        if isinstance(what, int):
            payload = self._messages[what]
            text = f"gets {payload}"
            if isinstance(payload, Envelope):
                text = f"gets from {payload.sender.engine_id}: {payload.message}"
            elif isinstance(payload, RemoteRequest):
                text = f"gets the prefill request {payload.handoff_id}"
        return f"  {self.scope.engines[engine]} {text}"
