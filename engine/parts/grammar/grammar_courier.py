"""Compiles the grammars of live requests while the step loop goes on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import wait

from engine.core.door.inputs import Aborted, Input
from engine.core.mail.courier import Courier, TakeMessages
from engine.core.request import Request
from engine.errors import ServingError
from engine.grammars.compiler import COMPILE_TIMEOUT_S, Compilation, GrammarCompiler
from engine.parts.grammar.grammars import Grammars
from engine.parts.grammar.inputs import GrammarSet
from engine.wire.generate_request import GenerateRequest


class GrammarCourier(Courier):
    """Brings requests their grammars."""

    def __init__(self, grammars: Grammars, compiler: GrammarCompiler):
        self._grammars, self._compiler = grammars, compiler
        #: Those of which the scheduler has not heard yet, by the request that waits for it.
        self.running: dict[Request, Compilation] = {}

    @property
    def is_awaited(self) -> bool:
        return self._grammars.is_awaited

    def check(self, message: GenerateRequest, now: float) -> None:
        """Compile a grammar and wait for it. Raises RequestError if that fails."""
        if message.params.structured_outputs is not None:
            compilation = self._compiler.start(message.params.structured_outputs, [], now)
            wait([compilation.compiled], COMPILE_TIMEOUT_S)
            self._compiler.finish(compilation)

    def arrived(self, now: float) -> Iterator[Input]:
        """Yield what lets requests start whose grammar has been compiled, and ends those whose grammar has not."""
        for request, compilation in list(self.running.items()):
            if request not in self._grammars.waiting:
                del self.running[request]  # it has ended
            elif compilation.finished(now):
                del self.running[request]
                try:
                    grammar = self._compiler.finish(compilation)
                except ServingError as error:
                    yield Aborted(request.request_id, error=error)
                else:
                    yield GrammarSet(request.request_id, grammar)

    def deliver(self, take: TakeMessages) -> None:
        for request, client in self._grammars.waiting.items():
            if request not in self.running:
                self._start(request, client)

    def _start(self, request: Request, client: str) -> None:
        params, output = request.params.structured_outputs, request.tokens[request.num_prompt :]
        assert params is not None
        self.running[request] = compilation = self._compiler.start(params, output, request.clock.arrived_at, client)
        compilation.compiled.add_done_callback(lambda _: self.came.set())

    def close(self) -> None:
        """Stop the compiler's threads."""
        self._compiler.close()
