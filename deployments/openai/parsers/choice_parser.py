"""One choice of a chat answer: from its text to reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from deployments.openai.parsers.hermes import HermesParser
from deployments.openai.parsers.json_calls import JsonCallsParser
from deployments.openai.parsers.named_call import NamedCallParser
from deployments.openai.parsers.output_parser import CallArguments, CallStart, Content, OutputParser, Piece, Reasoning
from deployments.openai.parsers.reasoning import ThinkParser
from deployments.openai.responses import FinishReason
from engine.text.text_stream import TextChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """What to look for in the answers to one request.

    tool_calls: a ToolCallParser other than auto; `json` for an array of calls; `named` for the arguments of the only
        one of `tools`.
    reasoning: look for it; reasoning_begun: the prompt ended inside of it; include_reasoning: hand it out.
    parallel: all calls count, not only the first.
    """

    tool_calls: str = "none"
    tools: Collection[str] = field(default_factory=frozenset)
    parallel: bool = True
    reasoning: bool = False
    reasoning_begun: bool = False
    include_reasoning: bool = True

    def call_parser(self, *, early: bool) -> OutputParser | None:
        match self.tool_calls:
            case "none":
                return None
            case "named":
                return NamedCallParser(next(iter(self.tools)))
            case "hermes":
                return HermesParser(early=early)
            case _:
                return JsonCallsParser(self.tools, early=early)


class ChoiceParser:
    """`early`: see CallReader; for streams."""

    def __init__(self, form: OutputFormat, *, early: bool):
        self._form = form
        self._think = ThinkParser(opened=form.reasoning_begun) if form.reasoning else None
        self._calls = form.call_parser(early=early)
        self.num_calls = 0

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._think is None else self._think.num_tokens

    def add(self, chunk: TextChunk) -> list[Piece]:
        if self._think is not None:
            self._think.count(chunk.offsets)
        return [piece for piece in self._read(chunk) if self._wanted(piece)]

    def finish_reason(self, chunk: TextChunk) -> FinishReason | None:
        """OpenAI reports `stop` after the call of a function that the request named, as after any other answer."""
        called = self.num_calls > 0 and self._form.tool_calls != "named"
        return "tool_calls" if called and chunk.finish_reason == "stop" else chunk.finish_reason

    def _read(self, chunk: TextChunk) -> list[Piece]:
        final = chunk.finish_reason is not None
        pieces: list[Piece] = [Content(chunk.text)] if chunk.text else []
        for parser in (self._think, self._calls):
            if parser is not None:
                pieces = _through(parser, pieces, final=final)
        return pieces

    def _wanted(self, piece: Piece) -> bool:
        match piece:
            case CallStart():
                self.num_calls += 1
                return self._form.parallel or self.num_calls == 1
            case CallArguments():
                return self._form.parallel or self.num_calls == 1
            case Reasoning():
                return self._form.include_reasoning
            case _:
                return True


def _through(parser: OutputParser, pieces: list[Piece], *, final: bool) -> list[Piece]:
    """What `parser` makes of the content."""
    out: list[Piece] = []
    for piece in pieces:
        out += parser.add(piece.text) if isinstance(piece, Content) else [piece]
    return out + parser.finish() if final else out
