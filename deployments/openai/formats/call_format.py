"""All that is known of the format in which a family of models writes tool calls and reasoning."""

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
    """In configurations (`reasoning_parser`)."""
    marker: str
    """The chat template of a model that reasons so has it."""
    tags: ReasoningTags | None
    """None if the parser of calls finds the reasoning too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """The format of a family of models. Its calls stand between markers, or are the whole output."""

    names: tuple[str, ...] = ()
    """In configurations (`tool_call_parser`); none for reasoning alone."""
    example: str = "(?!)"
    """Regular expression of a call of `example_function` with `{"key": "value"}`, as the chat template writes it."""
    markup: CallMarkup | None = None
    """Reads calls between markers."""
    whole: type[JsonCallsParser] | None = None
    """Parser of outputs that are calls and nothing else."""
    whole_key: str = ""
    """The key of the arguments in calls that are the whole output, if they are JSON that a grammar can enforce."""
    syntax: CallSyntax | None = None
    """Writes calls between markers into a grammar; None if they cannot be enforced."""
    older: tuple[str, CallSyntax] | None = None
    """The syntax of models to which this marker is no token."""
    more_markers: tuple[str, ...] = ()
    """Texts that may be special tokens, besides those of the markup."""
    ends_reasoning: bool = False
    """The markers are single tokens, so that they also end reasoning that has no end."""
    id_length: int | None = None
    """Length of the ids of calls, if the chat template asks for one."""
    reasoning: ReasoningFormat | None = None

    @property
    def markers(self) -> list[str]:
        """Texts that may be single tokens."""
        return [*(self.markup.markers if self.markup else ()), *self.more_markers]

    def parser(self, tools: ToolSchemas, *, streaming: bool) -> OutputParser | None:
        """Return the parser of calls, or None if that of the reasoning finds them too."""
        if self.markup is not None:
            return MarkedCallsParser(self.markup, tools, streaming=streaming)
        return None if self.whole is None else self.whole(tools, streaming=streaming)

    @property
    def in_messages(self) -> bool:
        """True if calls are messages like reasoning and content, with one parser for all."""
        return self.markup is None and self.whole is None

    def syntax_for(self, token_of: Callable[[str], int | None]) -> CallSyntax | None:
        """Return the syntax of calls of a model. token_of: see Lark."""
        return self.older[1] if self.older is not None and token_of(self.older[0]) is None else self.syntax

    def forced_natively(self, token_of: Callable[[str], int | None]) -> bool:
        """Return whether forced calls are written as the model writes its own. Others are a JSON array, as in vLLM."""
        syntax = self.syntax_for(token_of)
        return self.in_messages or (syntax is not None and "{object}" not in syntax.call)
