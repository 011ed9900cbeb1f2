"""An answer that is nothing but the arguments of one function, because the request named it."""

from __future__ import annotations

from deployments.openai.parsers.output_parser import CallArguments, CallStart, OutputEvent


class NamedCallParser:
    def __init__(self, name: str):
        self._name = name
        self._started = False

    def add(self, text: str) -> list[OutputEvent]:
        if not self._started:
            text = text.lstrip()
            if text:
                self._started = True
                return [CallStart(self._name), CallArguments(text)]
        return [CallArguments(text)] if text else []

    def finish(self) -> list[OutputEvent]:
        return []
