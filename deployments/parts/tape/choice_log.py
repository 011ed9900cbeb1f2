"""The newest choices of a router, in a bounded number of bytes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from deployments.parts.tape.choice_record import RecordedChoice, RecordedEngine, RouterTape
from deployments.replicas.pools import RoutedPool
from deployments.routing.choice_observer import Choice, ChoiceObserver
from deployments.routing.config import PolicyName, Role
from deployments.routing.cost import EngineCandidate, RoutingCost
from deployments.routing.policies import Lookup


class ChoiceLog(ChoiceObserver):
    def __init__(self, max_bytes: int, wall: Callable[[], float] = time.time):
        """wall: returns seconds since 1970."""
        self._drawn: list[int] = []
        self._orders: list[list[str]] = []
        self._known: dict[str, RecordedEngine] = {}
        self._memory = ""
        self._choices: deque[bytes] = deque()
        self._bytes, self._max_bytes, self._wall = 0, max_bytes, wall
        self._encode = msgspec.msgpack.Encoder().encode
        self._router: tuple[Role, PolicyName, RoutingCost] | None = None

    @classmethod
    def of(cls, pool: RoutedPool, max_mib: int) -> ChoiceLog:
        """Record the choices of the router to a pool from now on."""
        log = cls(max_mib * 2**20)
        pool.observer = log
        return log

    def watch(self, role: Role, policy: PolicyName, cost: RoutingCost) -> None:
        self._router = role, policy, cost

    def begin(self, lookup: Lookup, memory: str) -> Lookup:
        self._drawn.clear()
        self._orders.clear()
        self._known, self._memory = {}, memory

        def watched(engine: str) -> EngineCandidate:
            found = lookup(engine)
            if engine not in self._known:
                self._known[engine] = RecordedEngine.of(found)
            return found

        return watched

    def drawn(self, number: int) -> None:
        self._drawn.append(number)

    def ordered(self, engines: list[str]) -> None:
        self._orders.append(engines)

    def chosen(self, choice: Choice) -> None:
        prompt = choice.prompt
        recorded = RecordedChoice(
            at=self._wall(),
            request_id=prompt.request_id,
            num_tokens=prompt.num_tokens,
            num_blocks=len(prompt.keys),
            images=prompt.images,
            has_session=bool(prompt.session),
            has_adapter=bool(prompt.adapter),
            engines=list(choice.engines),
            unhealthy=list(choice.unhealthy),
            home=choice.home,
            memory=self._memory,
            drawn=self._drawn,
            orders=self._orders,
            known=self._known,
            ranked=list(choice.ranked),
            reason=choice.reason,
            cached_tokens=choice.cached_tokens,
            holder=choice.holder,
            moves=choice.moves,
        )
        data = self._encode(recorded)
        self._choices.append(data)
        self._bytes += len(data)
        while self._bytes > self._max_bytes:
            self._bytes -= len(self._choices.popleft())

    def take(self, router: str) -> list[bytes]:
        """Return the choices so far: a RouterTape in msgpack; nothing if there are none. router: id of its process."""
        choices = list(self._choices)
        if not choices or self._router is None:
            return []
        role, policy, cost = self._router
        return [self._encode(RouterTape(router=router, role=role, policy=policy, cost=cost, choices=choices))]
