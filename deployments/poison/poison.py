"""Requests with which engines end: they are tried apart from others, and refused for a while once they have ended two.

An engine that ends by itself leaves behind what it was doing (engine/black_box.py): adapters that it read, grammars
that it compiled, requests that it computed. All of these are suspects. An ingress sends one suspect at a time to an
engine, and an engine computes one at a time of those that ingresses send (engine/serving/trial_queue.py), until it
has got a few tokens and is no suspect any more. If an engine ends by itself with it, it is poison:
what it names is remembered and refused for POISON_S, by all ingresses that are up. Uses no clock and no socket.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from deployments.errors import PoisonRequest
from deployments.poison.named import Named, all_named
from deployments.poison.trial import Trial
from engine.black_box import ended_key, read_key
from engine.wire.generate_request import GenerateRequest

T = TypeVar("T")
POISON_S = 600.0  # for which it is refused
MAX_REMEMBERED = 1000


def _is_only_name(doing: Sequence[str]) -> bool:
    """Return whether an engine that has ended was reading or compiling one thing only."""
    return len({key for key in doing if key.startswith((read_key(""), "compiles "))}) == 1


def _remember(memory: OrderedDict[str, T], key: str, value: T) -> None:
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > MAX_REMEMBERED:
        memory.popitem(last=False)


class Suspicion(NamedTuple):
    engines: set[str]
    """Those that have ended with it."""
    until: float


class Poison:
    """What one ingress remembers of one model's requests. Times are seconds on any one clock."""

    def __init__(self) -> None:
        self.tell_others: Callable[[Named], None] = lambda named: None
        """Called with what is refused from now on, so that other ingresses refuse it too."""
        self._refused: OrderedDict[str, float] = OrderedDict()  # by digest, until when
        self._suspects: OrderedDict[str, Suspicion] = OrderedDict()  # by digest
        self._lock = asyncio.Lock()

    def check(self, request: GenerateRequest, now: float) -> None:
        """Raise PoisonRequest if something that the request names is refused."""
        for named in all_named(request) if self._refused else ():
            self.check_named(named, now)

    def check_named(self, named: Named, now: float) -> None:
        if (left_s := self._refused.get(named.digest, now) - now) > 0:
            raise PoisonRequest(named.what, left_s)

    def suspects(self, request: GenerateRequest, now: float) -> bool:
        """Return whether an engine has ended with something that the request names."""
        if not self._suspects:
            return False
        found = (self._suspects.get(named.digest) for named in all_named(request))
        return any(suspicion is not None and now < suspicion.until for suspicion in found)

    def survived(self, request: GenerateRequest) -> None:
        """Suspect nothing that the request names any more, because an engine has lived on with it."""
        for named in all_named(request) if self._suspects else ():
            self._suspects.pop(named.digest, None)

    def blame(self, named: Named, doing: Sequence[str], on_trial: bool, now: float) -> PoisonRequest | None:
        """Note that an engine has ended by itself with this. Returns an error if it is the second one, and nothing else
        can be the cause: then it is refused for POISON_S. on_trial: whether it was tried apart."""
        ended = next((key for key in doing if key.startswith(ended_key(""))), "")
        known = self._suspects.get(named.digest)
        engines = {ended} if known is None or now >= known.until else {*known.engines, ended}
        _remember(self._suspects, named.digest, Suspicion(engines, now + POISON_S))
        if len(engines) < 2 or not (on_trial or (not named.is_own and _is_only_name(doing))):
            return None
        self.refuse(named, now)
        self.tell_others(named)
        return PoisonRequest(named.what, POISON_S)

    def refuse(self, named: Named, now: float) -> None:
        """Refuse this from now on for POISON_S."""
        _remember(self._refused, named.digest, now + POISON_S)

    async def begin_trial(self) -> Trial:
        """Wait until this ingress tries no other suspect, but at most TRIAL_S."""
        trial = Trial(self._lock)
        await trial.begin()
        return trial
