"""Lets requests wait for their grammars, and constrains them from then on."""

from __future__ import annotations

from collections.abc import Callable

from engine.core.constraint import Constraint
from engine.core.door.kernel import Kernel
from engine.core.door.part import Part
from engine.core.request import Request
from engine.core.request_queue import RequestQueue
from engine.errors import ServingError
from engine.wire.generate_request import GenerateRequest
from engine.wire.remote_request import RemoteRequest


class Grammars(Part):
    """A request with a grammar keeps its place in the order, but does not start until its grammar is compiled."""

    field = "structured_outputs"
    _queue: RequestQueue

    def __init__(self) -> None:
        #: Requests whose grammars are not compiled yet, and the clients who are charged for that.
        self.waiting: dict[Request, str] = {}
        #: Called with each new grammar of a request; returns the one to use instead.
        self.watch: Callable[[Constraint], Constraint] | None = None

    def attach(self, kernel: Kernel) -> None:
        super().attach(kernel)
        self._queue = kernel.queue

    @property
    def is_awaited(self) -> bool:
        """Whether a grammar or a mask is on its way that a request needs."""
        queue = self._queue
        return bool(self.waiting) or any(r.constraint is not None for r in [*queue.running, *queue.waiting])

    def opened(self, request: Request, asked: GenerateRequest | RemoteRequest) -> None:
        if request.params.structured_outputs is not None:
            self.waiting[request] = asked.client if isinstance(asked, GenerateRequest) else ""

    def may_start(self, request: Request) -> bool:
        return request not in self.waiting

    def constrain(self, request: Request, grammar: Constraint) -> None:
        """Let a request start whose grammar is compiled."""
        del self.waiting[request]
        request.constraint = grammar if self.watch is None else self.watch(grammar)

    def ending(self, request: Request, error: ServingError | None) -> None:
        self.waiting.pop(request, None)
