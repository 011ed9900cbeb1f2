"""What parts of the HTTP edge hear of one sequence, and of all sequences of one HTTP request."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from deployments.billing.bill import Bill
from deployments.frontend.retry import RetryState
from engine.wire.generate_request import GenerateRequest
from engine.wire.token_delta import TokenDelta

Reason = Literal["stop", "length", "abort", "error", "refused"]
"""How a sequence ended for its client. `refused`: it was never admitted."""


class SequenceView(Protocol):
    """What observers see of a sequence."""

    index: int
    """Its index in the HTTP request."""
    retry: RetryState

    @property
    def engine(self) -> str:
        """Id of the engine that works on the current attempt. A delta of it must have arrived."""


class SequenceObserver:
    """All methods do nothing by default, and only those that a class overrides are called, in this order."""

    overridden: ClassVar[list[str]] = []

    def __init_subclass__(cls) -> None:
        methods = [name for name in vars(SequenceObserver) if not name.startswith("_") and name != "overridden"]
        cls.overridden = [name for name in methods if getattr(cls, name) is not getattr(SequenceObserver, name)]

    def waits(self) -> None:
        """The sequence begins to wait for admission. `ended` will follow. May raise an error, which ends the HTTP
        request."""

    def admitted(self) -> None:
        """Admission has let the HTTP request pass."""

    async def attempting(self) -> None:
        """An attempt is about to be sent to an engine, once this returns. May raise an error, which ends the
        attempt."""

    def sending(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request to send in place of this one. Called for each attempt."""
        return request

    def sent(self, request_id: str) -> None:
        """An attempt has been started. request_id: id of the attempt."""

    def arrived(self, delta: TokenDelta) -> None:
        """A delta has come, and has passed no check yet. The last one of an attempt that was aborted may come after
        `ended`."""

    def received(self, delta: TokenDelta) -> TokenDelta:
        """Return the delta to continue with in place of this one, which has passed all checks. With a `finish_reason`,
        it ends the sequence, also in its engine."""
        return delta

    def delta(self, delta: TokenDelta, num_tokens: int) -> None:
        """A delta has become text. num_tokens: number of its tokens that the client gets, which end at a stop
        string."""

    def failed(self, error: BaseException) -> BaseException:
        """Return the error that counts in place of this one, with which an attempt has failed."""
        return error

    def replayed(self, reason: str, error: BaseException) -> None:
        """Another attempt follows the one that failed or has left its engine."""

    def ended(self, reason: Reason, error: Exception | None) -> None:
        """The sequence has ended for the client. Called once."""


class Observers:
    """The observers of one sequence: of each method, those that override it."""

    def __init__(self, observers: Iterable[SequenceObserver]):
        self.waits: list[Callable[[], None]] = []
        self.admitted: list[Callable[[], None]] = []
        self.attempting: list[Callable[[], Awaitable[None]]] = []
        self.sending: list[Callable[[GenerateRequest], GenerateRequest]] = []
        self.sent: list[Callable[[str], None]] = []
        self.arrived: list[Callable[[TokenDelta], None]] = []
        self.received: list[Callable[[TokenDelta], TokenDelta]] = []
        self.delta: list[Callable[[TokenDelta, int], None]] = []
        self.failed: list[Callable[[BaseException], BaseException]] = []
        self.replayed: list[Callable[[str, BaseException], None]] = []
        self.ended: list[Callable[[Reason, Exception | None], None]] = []
        for observer in observers:
            for name in observer.overridden:
                getattr(self, name).append(getattr(observer, name))


Observe = Callable[[SequenceView], SequenceObserver | None]
"""Returns what observes a sequence, or None for a sequence that it does not observe."""


@dataclass(frozen=True, slots=True)
class RequestSize:
    """What is known of a request before it runs."""

    prompt_tokens: int
    sequences: int
    max_tokens: int | None
    """Maximum number of output tokens of each sequence; None if the request does not say."""
    context_tokens: float = math.inf
    """The same by the model's context."""
    resumes: bool = False
    """Whether another ingress had admitted it, and has charged for its prompt."""


class GenerationObserver:
    """All methods do nothing by default."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Return a block in which the request waits for admission and runs. Entering it may raise an error, which
        refuses the request."""
        return nullcontext()

    async def taking(self, num_tokens: int) -> None:
        """The next delta is taken once this returns. May raise an error, which ends the request. num_tokens: of the
        delta; several steps, if its client is slow."""


ObserveGeneration = Callable[[RequestSize, Bill], GenerationObserver | None]
"""Returns what observes the sequences of an HTTP request, or None for one that it does not observe."""
