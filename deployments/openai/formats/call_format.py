"""Definition of the format in which a model family writes tool calls and reasoning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deployments.openai.call_grammar import CallSyntax
from deployments.openai.parsers.output_parser import OutputParser
from deployments.openai.parsers.reasoning.think import ReasoningTags
from deployments.openai.parsers.tools.marked_calls import CallMarkup, MarkedCallsParser, ToolSchemas
from deployments.openai.parsers.tools.whole_calls import JsonCallsParser


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    names: tuple[str, ...]
    """Names in configurations (`reasoning_parser`)."""
    markers: tuple[str, ...]
    """Texts by which the format is recognised in a chat template."""
    tags: ReasoningTags | None
    """Tags around the reasoning; None if the parser of calls finds the reasoning too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """Format of a model family. Calls are between markers, or are the whole output."""

    names: tuple[str, ...] = ()
    """Names in configurations (`tool_call_parser`); empty for a format of reasoning only."""
    example: str = "(?!)"
    """Regular expression for a call of `example_function` with `{"key": "value"}` as the chat template writes it."""
    markup: CallMarkup | None = None
    """Markup of calls between markers."""
    whole: type[JsonCallsParser] | None = None
    """Parser of outputs that consist of calls only."""
    whole_key: str = ""
    """Key of the arguments in calls that are the whole output, if a grammar can enforce them as JSON."""
    syntax: CallSyntax | None = None
    """Syntax of calls between markers, for grammars; None if calls cannot be enforced."""
    older: tuple[str, CallSyntax] | None = None
    """(marker, syntax) of older models, for which this marker is not a token."""
    more_markers: tuple[str, ...] = ()
    """Texts that may be special tokens, besides those of the markup."""
    id_length: int | None = None
    """Length of call ids, if the chat template requires one."""
    reasoning: ReasoningFormat | None = None

    @property
    def markers(self) -> list[str]:
        """Texts that can be single tokens."""
        return [*(self.markup.markers if self.markup else ()), *self.more_markers]

    @property
    def opens(self) -> tuple[str, ...]:
        """Markers that begin calls."""
        return () if self.markup is None else self.markup.opens

    def parser(self, tools: ToolSchemas) -> OutputParser | None:
        """Return the parser of calls, or None if the parser of reasoning finds them too."""
        if self.markup is not None:
            return MarkedCallsParser(self.markup, tools)
        return None if self.whole is None else self.whole(tools)

    @property
    def in_messages(self) -> bool:
        """Whether calls, reasoning and content are all messages, which one parser reads."""
        return self.markup is None and self.whole is None

    def syntax_for(self, token_of: Callable[[str], int | None]) -> CallSyntax | None:
        """Return the syntax of a model's calls. token_of: as in Lark."""
        return self.older[1] if self.older is not None and token_of(self.older[0]) is None else self.syntax

    def forced_natively(self, token_of: Callable[[str], int | None]) -> bool:
        """Return whether forced calls use the model's own format. Otherwise they are a JSON array, as in vLLM."""
        syntax = self.syntax_for(token_of)
        return self.in_messages or (syntax is not None and "{object}" not in syntax.call)
