"""Texts of others in a terminal: an answer, a tape or a server's error may contain escape sequences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment


def printable(text: str) -> str:
    """Return a text without control characters but ends of lines and tabs."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


class PrintableConsole(Console):
    """Shows no control characters but its own."""

    def render(self, *args: Any, **options: Any) -> Iterable[Segment]:
        for segment in super().render(*args, **options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
