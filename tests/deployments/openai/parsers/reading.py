"""Reading the outputs of models, whole and in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from deployments.openai.formats.choice_parser import ChoiceParser, OutputFormat
from deployments.openai.parsers.output_parser import CallArguments, CallStart, OutputEvent
from engine.text.text_stream import TextChunk


def read(output_format: OutputFormat, parts: Iterable[str], *, reason: str = "stop") -> list[OutputEvent]:
    """Return all events, with neighbours of one kind joined."""
    parser, events, length, parts = ChoiceParser(output_format), [], 0, list(parts)
    for i, text in enumerate(parts):
        last = reason if i == len(parts) - 1 else None
        events += parser.add(TextChunk(text, [0], [length], None, None, last))
        length += len(text)
    return joined(events)


def joined(events: list[OutputEvent]) -> list[OutputEvent]:
    out: list[OutputEvent] = []
    for event in events:
        if out and type(event) is type(out[-1]) and not isinstance(event, CallStart):
            event = type(event)(out.pop().text + event.text)
        out.append(event)
    return out


def whole(output_format: OutputFormat, text: str) -> list[OutputEvent]:
    return read(output_format, [text])


def cut(text: str, cuts: Iterable[int]) -> list[str]:
    edges = [0, *sorted(edge for edge in cuts if edge <= len(text)), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


def call(name: str, arguments: str, call_id: str | None = None) -> list[OutputEvent]:
    return [CallStart(name, call_id), CallArguments(arguments)]
