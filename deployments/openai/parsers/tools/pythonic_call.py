"""One tool call written as a call in Python: `f(city="Paris", days=[1, 2])`."""

from __future__ import annotations

import ast
from collections.abc import Container
from typing import Any

import msgspec

from deployments.openai.parsers.output_parser import CallArguments, OutputEvent, State
from deployments.openai.parsers.tools.call_reader import CallReader

_JSON_NAMES = {"true": True, "false": False, "null": None}


class PythonicCall(CallReader):
    """Reads a call of one of `names` with keyword arguments that are literals. The call is emitted all at once, even in
    a stream."""

    def __init__(self, names: Container[str], *, streaming: bool):
        super().__init__(streaming=streaming)
        self._names = names
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def _start(self, out: list[OutputEvent], final: bool) -> State | None:
        head = self._take_head("(")
        if head is None:
            return self._lacks_head("(")
        self._buffer = "(" + self._buffer
        return self._arguments if head in self._names else self._fail()

    def _arguments(self, out: list[OutputEvent], final: bool) -> State | None:
        for i, char in enumerate(self._buffer):
            if self._quote:
                if self._escaped or char == "\\":
                    self._escaped = not self._escaped
                elif char == self._quote:
                    self._quote = ""
            elif char in "\"'":
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif char in ")]}":
                self._depth -= 1
                if self._depth == 0:
                    self._buffer = self._buffer[i + 1 :]
                    return self._complete(out)
        self._buffer = ""
        return None

    def _complete(self, out: list[OutputEvent]) -> State | None:
        try:
            call = ast.parse(self.raw, mode="eval").body
            if not isinstance(call, ast.Call) or call.args:
                return self._fail()
            arguments = {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
            encoded = msgspec.json.encode(arguments).decode()
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return self._fail()
        self._begin(out, ast.unparse(call.func))
        out.append(CallArguments(encoded))
        self.ended = True
        return None


def _value(node: ast.expr) -> Any:
    """Return the value of a literal, accepting JSON's names as well. Raises ValueError for other code."""
    match node:
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {str(_value(key)): _value(value) for key, value in zip(keys, values, strict=True) if key is not None}
    return ast.literal_eval(node)
