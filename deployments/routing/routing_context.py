"""Context that a Serve call gives to its handle's router: the digest of its prompt, and the call itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from deployments.carried import Carried
from deployments.routing.choice_observer import ChoiceObserver
from deployments.routing.config import Role
from deployments.routing.prompt_digest import EMPTY, PromptDigest
from deployments.routing.stats import RoutingStats
from engine.wire.generate_request import ModelIdentity
from engine.wire.parts.kv_fetching import KVHolder

# answered: the engine had the request and has ended it. lost: the replica or its engine is gone. ended: anything else.
CallOutcome = Literal["answered", "lost", "ended"]


class RoutingContext:
    """Context of one call. The router runs in the caller's process, but possibly in another thread.

    The replica gets only `holder` and `engine` from the context. The caller closes the context when the call has ended;
    Serve may learn of that later: over gRPC, it learns that a replica has accepted a call only when the call ends.
    """

    def __init__(
        self,
        prompt: PromptDigest = EMPTY,
        stats: RoutingStats | None = None,
        avoid: Sequence[str] = (),
        model: ModelIdentity | None = None,
        note: Callable[[str], None] | None = None,
        role: Role = "decode",
        observer: ChoiceObserver | None = None,
        numerics: str = "",
    ):
        """stats: where the router counts.
        avoid: ids of engines that should not get the call if there are others.
        model: model that the call needs, if any engine serves it.
        note: function called with a sentence each time the router chooses a replica.
        observer: hears of the router's choice; None for no one.
        role: role that a replica needs for the call, if any replica has it; the same for all calls of a handle.
        numerics: of the engine that should get the call if there is such a one."""
        self.numerics = numerics
        self.prompt, self.avoid, self.model, self.role = prompt, avoid, model, role
        self.stats = RoutingStats() if stats is None else stats
        self.observer = ChoiceObserver() if observer is None else observer
        self.note = note or (lambda _: None)
        self.holder: KVHolder | None = None  #: set by the router: an engine from which the chosen one may fetch KV
        self.engine = ""  #: set by the router: id of the chosen engine
        self._outcome: CallOutcome | None = None
        self._release: Callable[[CallOutcome], object] | None = None

    def placed(self, release: Callable[[CallOutcome], object]) -> None:
        """Register `release`. It is called when the call has ended, perhaps twice, and from any thread."""
        self._release = release
        if self._outcome is not None:  # `close` may have run just before `release` was set
            release(self._outcome)

    def close(self, outcome: CallOutcome) -> None:
        self._outcome = outcome
        if self._release is not None:
            self._release(outcome)

    def __reduce__(self) -> tuple[type[RoutingContext], tuple[()], dict[str, Any]]:
        holder = None if self.holder is None else Carried(self.holder)
        return RoutingContext, (), {"holder": holder, "engine": self.engine}
