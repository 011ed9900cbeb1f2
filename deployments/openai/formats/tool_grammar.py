"""Grammar of an output whose calls are forced or strict, or whose structured content may follow reasoning or calls.

The grammar is in llguidance's Lark (see its docs/syntax.md). In it, `<[7]>` stands for token 7, which no pattern
matches.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import msgspec
from llguidance import LLMatcher

from deployments.openai.call_grammar import (
    CallGrammar,
    Lark,
    calls_rule,
    json_rule,
    regex_rule,
)
from deployments.openai.chat_body import ChatBody
from deployments.openai.conversation import NamedToolChoice, Tool
from deployments.openai.formats.call_format import CallFormat
from deployments.openai.formats.families import CALL_FORMATS, HARMONY
from deployments.openai.parsers import harmony
from deployments.openai.parsers.reasoning.think import ReasoningTags
from engine.errors import InvalidParameter
from engine.grammars.compiler import limits
from engine.grammars.grammar import one_line
from engine.grammars.json_schema import CACHED_RESULTS, cached, enforceable
from engine.grammars.references import SchemaError
from engine.wire.structured_outputs import StructuredOutputsParams

Thinking = Literal["never", "maybe", "begun"]
"""Whether the output begins with reasoning; `begun` if the prompt already ends inside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolGrammar:
    """Grammar of the outputs that one request allows."""

    body: ChatBody
    content: StructuredOutputsParams | None
    """Structure requested for the content; None for any text."""
    tool_call_parser: str
    """Name of the format of calls that are not forced."""
    tags: ReasoningTags | None
    """Tags around reasoning."""
    thinking: Thinking
    lark: Lark

    def params(self) -> StructuredOutputsParams | None:
        """Return the grammar; None if nothing needs to be enforced. Raises InvalidParameter."""
        tools = self.body.offered_tools
        callable_names = {tool.function.name for tool in self._tools}
        for i, tool in enumerate(tools):
            if (self._forced or tool.function.strict) and tool.function.name in callable_names:
                check_schema(tool.arguments_schema, f"tools[{i}].function.parameters", closed=self.lark.closed)
        enforced = self._forced or (tools and any(tool.function.strict for tool in tools))
        field = "tools" if self._forced or self.content is None else self.content.field
        if self._format is HARMONY:
            if self.body.continue_final_message or not (enforced or self.content):
                return self.content
            return self._grammar(self._harmony(), field)
        if self._forced:
            if self._format is not None and self._format.forced_natively(self.lark.token_of):
                return self._grammar(self._native(strict_only=False).calls(parallel=self._parallel), field)
            return self._grammar(self._forced_rule(), field)
        if enforced or (tools and self.content is not None):
            return self._grammar(self._content_or_calls(), field)
        if self.content is None or self.thinking == "never":
            return self.content
        return self._grammar(self._content(self.content), field)

    @property
    def _format(self) -> CallFormat | None:
        return CALL_FORMATS.get(self.tool_call_parser)

    @property
    def _forced(self) -> bool:
        return self.body.tool_choice == "required" or isinstance(self.body.tool_choice, NamedToolChoice)

    @property
    def _parallel(self) -> bool:
        return self.body.parallel_tool_calls and not isinstance(self.body.tool_choice, NamedToolChoice)

    @property
    def _tools(self) -> list[Tool]:
        choice = self.body.tool_choice
        name = choice.function.name if isinstance(choice, NamedToolChoice) else None
        return [tool for tool in self.body.offered_tools if name in (None, tool.function.name)]

    def _native(self, *, strict_only: bool) -> CallGrammar:
        syntax = None if self._format is None else self._format.syntax_for(self.lark.token_of)
        if syntax is None:
            names = [tool.function.name for tool in self._tools]
            limit = (
                "neither strict nor combined with a response format, because calls in the "
                f"format {self.tool_call_parser}"
            )
            raise InvalidParameter("tools", names, f"{limit} cannot be enforced")
        return CallGrammar(syntax, self.lark, self._tools, strict_only)

    def _forced_rule(self) -> str:
        if isinstance(self.body.tool_choice, NamedToolChoice):
            return self.lark.json(self._tools[0].arguments_schema)
        limits = {"minItems": 1} if self._parallel else {"minItems": 1, "maxItems": 1}
        return calls_rule(self.lark, self._tools, "arguments", False, **limits)

    def _content_or_calls(self) -> str:
        """Return the rule for content or calls, between which the model may choose."""
        if self._format is not None and self._format.whole_key:
            call = calls_rule(self.lark, self._tools, self._format.whole_key, True)
            calls = f'{call} (";" GAP {call})*' if self._parallel else call
            return f"{'OTHER_TEXT?' if self.content is None else self._content(self.content)} | {calls}"
        grammar = self._native(strict_only=True)
        if self.content is not None:
            return f"{self._content(self.content)} | {grammar.calls(parallel=self._parallel)}"
        call = f"{self.lark.until(grammar.opener)} {grammar.calls(parallel=self._parallel, opened=True)}"
        return f"({call})* TEXT" if self._parallel else f"TEXT | {call}"

    def _harmony(self) -> str:
        """Return the rule for messages: reasoning, an announcement of what the model is about to do, then a call or an
        answer."""
        text, until_end = self.lark.text, self.lark.until("<|end|>")
        analysis, commentary, final = (
            text(f"{harmony.CHANNEL}{channel}") for channel in ("analysis", "commentary", "final")
        )
        message, next_message = text(harmony.MESSAGE), f"{until_end} {text(harmony.START + 'assistant')}"
        is_json = f'(" " {text(harmony.CONSTRAIN)}? "json")?'
        last = []
        for tool in self._tools:
            name, free = tool.function.name, not (self._forced or tool.function.strict)
            arguments = self.lark.json({"type": "object"} if free else tool.arguments_schema)
            recipient = json.dumps(f" to=functions.{name}")
            header = f"({commentary} {recipient} | {recipient} {commentary})"
            last.append(f"{header} {is_json} {message} {arguments}")
        if not self._forced:
            last.append(
                f"{final} {is_json} {message} {'TEXT' if self.content is None else self._content(self.content)}"
            )
        return f"({analysis} {message} {next_message})* ({commentary} {message} {next_message})? ({' | '.join(last)})"

    def _grammar(self, answer: str, field: str) -> StructuredOutputsParams:
        tags = self.tags or ReasoningTags()
        match self.thinking:
            case "never":
                start = "answer"
            case "maybe":
                opening = " | ".join(map(self.lark.text, tags.opens))
                start = f"(({opening}) {self.lark.until(*tags.closes)} GAP)? answer"
            case "begun":
                start = f"{self.lark.until(*tags.closes)} GAP answer"
        lines = [
            "%llguidance {}",
            f"start: {start}",
            f"answer: {answer}",
            *self.lark.lines,
            r"TEXT: /(?s:.*)/",
            r"OTHER_TEXT: /[^{\[\s](?s:.*)/",
            r"GAP: /[ \n]{0,4}/",
        ]
        return StructuredOutputsParams(grammar="\n".join(lines), field=field)

    def _content(self, content: StructuredOutputsParams) -> str:
        match content.kind:
            case "json" | "json_object":
                try:
                    given = content.disable_additional_properties
                    closed = self.lark.closed if given is None else given
                    return json_rule(enforceable(msgspec.json.decode(content.text), closed=closed))
                except SchemaError as error:
                    raise content.invalid(f"a JSON schema that can be enforced ({error})") from None
            case "regex":
                return regex_rule(content.text)
            case "choice":
                return f"({' | '.join(json.dumps(choice) for choice in content.choice or [])})"
            case "grammar":
                limit = "json, json_object, regex or choice if the model may reason or call tools"
                raise content.invalid(limit)


def check_schema(schema: dict[str, Any], field: str, *, closed: bool) -> None:
    """Raise InvalidParameter for a JSON schema that cannot be enforced. closed: as in SchemaBuilder."""
    if problem := cached(_problem_of, json.dumps(schema), closed):
        raise InvalidParameter(field, schema, f"a JSON schema that can be enforced ({one_line(problem)})")


@lru_cache(CACHED_RESULTS)
def _problem_of(schema: str, closed: bool) -> str:
    """Return the reason why a JSON schema cannot be enforced; empty if it can."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(enforceable(json.loads(schema), closed=closed))
        return str(LLMatcher.validate_grammar(grammar, None, limits=limits()))
    except BaseException as error:  # noqa: BLE001 - a panic in Rust is not an Exception, and concerns only this schema
        return str(error) or type(error).__name__
