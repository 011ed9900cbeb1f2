"""Grammars that are being compiled for live requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import wait

from engine.core.door.inputs import Aborted, GrammarSet, Input
from engine.core.request import Request, State
from engine.errors import ServingError
from engine.text.grammar import COMPILE_TIMEOUT_S, Compilation, GrammarCompiler
from engine.wire.structured_outputs import StructuredOutputsParams


class Compilations:
    """Compiles grammars while the step loop goes on. Used by the thread of the loop."""

    def __init__(self, compiler: GrammarCompiler, compiled: threading.Event | None = None):
        """compiled: what is set whenever a compilation ends."""
        self._compiler, self._compiled = compiler, compiled or threading.Event()
        #: Those that have not ended, by the request that waits for it.
        self.running: dict[Request, Compilation] = {}

    def check(self, params: StructuredOutputsParams, now: float) -> None:
        """Compile a grammar and wait for it. Raises RequestError if that fails."""
        compilation = self._compiler.start(params, [], now)
        wait([compilation.compiled], COMPILE_TIMEOUT_S)
        self._compiler.finish(compilation)

    def start(self, request: Request, now: float, client: str) -> None:
        """Start to compile the grammar of a new request, if it has one. client: who is charged for it."""
        if request.params.structured_outputs is None:
            return
        output = request.tokens[request.num_prompt :]
        compilation = self._compiler.start(request.params.structured_outputs, output, now, client)
        compilation.compiled.add_done_callback(lambda _: self._compiled.set())
        self.running[request] = compilation

    def finished(self, now: float) -> Iterator[Input]:
        """Yield what lets requests start whose grammar has been compiled, and ends those whose grammar has not."""
        for request, compilation in list(self.running.items()):
            if request.state is not State.WAITING_FOR_GRAMMAR:
                del self.running[request]  # it has ended
            elif compilation.finished(now):
                del self.running[request]
                try:
                    grammar = self._compiler.finish(compilation)
                except ServingError as error:
                    yield Aborted(request.request_id, error=error)
                else:
                    yield GrammarSet(request.request_id, grammar)

    def wait(self, seconds: float) -> None:
        """Wait until a compilation ends, for so long at most."""
        self._compiled.wait(seconds)
        self._compiled.clear()

    def close(self) -> None:
        """Stop the compiler's threads."""
        self._compiler.close()
