"""The grammar of an output whose calls are forced or strict, or whose content may follow reasoning or calls.

It is written in llguidance's Lark, see its docs/syntax.md. `<[7]>` is the token 7, which no pattern matches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from llguidance import LLMatcher

from deployments.openai.conversation import NamedToolChoice, Tool
from deployments.openai.parsers import ToolCallParserName
from deployments.openai.parsers.reasoning.think import ReasoningTags
from deployments.openai.parsers.tools.families import FAMILIES, HERMES
from deployments.openai.request_bodies import ChatBody
from engine.errors import InvalidParameter
from engine.text.grammar import WHITESPACE, limits, one_line
from engine.text.json_schema import without_annotations
from engine.wire.structured_outputs import StructuredOutputsParams

Thinking = Literal["never", "maybe", "begun"]
"""Says whether the output begins with reasoning; `begun` if the prompt ends inside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolGrammar:
    """The outputs that one request allows."""

    body: ChatBody
    content: StructuredOutputsParams | None
    """Structure that the request asks of the content; None for any text."""
    tool_call_parser: ToolCallParserName
    """Format of calls that are not forced."""
    tags: ReasoningTags | None
    """Tags around reasoning."""
    thinking: Thinking
    token_of: Callable[[str], int | None]
    """Id of the token that stands for a marker, or None if the marker is plain text."""

    def params(self) -> StructuredOutputsParams | None:
        """Return the grammar, or None if nothing needs to be enforced. Raises InvalidParameter."""
        tools, choice = self.body.offered_tools, self.body.tool_choice
        forced = choice == "required" or isinstance(choice, NamedToolChoice)
        for i, tool in enumerate(tools):
            if forced or tool.function.strict:
                check_schema(tool.arguments_schema, f"tools[{i}].function.parameters")
        if self.tool_call_parser == "openai":
            if forced or self.content is not None or any(tool.function.strict for tool in tools):
                field, given = ("tool_choice", choice) if forced else ("response_format", self.content)
                raise InvalidParameter(field, str(given), "left out: answers of this model cannot be enforced yet")
            return None
        if forced:
            schema = self._forced_schema()
            if self.thinking == "never":
                return StructuredOutputsParams(json=schema, field="tools")
            return self._lark(_json_rule(schema), "tools")
        if tools and (self.content is not None or any(tool.function.strict for tool in tools)):
            return self._lark(self._content_or_calls(), "tools" if self.content is None else self.content.field)
        if self.content is None or self.thinking == "never":
            return self.content
        return self._lark(_content_rule(self.content), self.content.field)

    def _forced_schema(self) -> dict[str, Any]:
        tools, choice = self.body.offered_tools, self.body.tool_choice
        if isinstance(choice, NamedToolChoice):
            return next(tool.arguments_schema for tool in tools if tool.function.name == choice.function.name)
        calls = calls_schema(tools, "arguments", "#/items", strict_only=False)
        max_items = {} if self.body.parallel_tool_calls else {"maxItems": 1}
        return {"type": "array", "minItems": 1, **max_items, "items": calls}

    def _content_or_calls(self) -> str:
        """Return the rule for calls that the model may write of its own accord."""
        tools, parallel = self.body.offered_tools, self.body.parallel_tool_calls
        family = FAMILIES.get(self.tool_call_parser)
        if family is HERMES:
            schema = calls_schema(tools, "arguments", "#", strict_only=True)
            call = f"GAP {_json_rule(schema)} GAP {self._marker(HERMES.closes[0])}"
            if self.content is None:
                return f"(until_call {call})* TEXT" if parallel else f"TEXT | until_call {call}"
            call = f"{self._marker(HERMES.opens[0])} {call}"
            calls = f"{call} (GAP {call})*" if parallel else call
        else:
            if family is not None:
                limit = f"left out or not strict: calls that {self.tool_call_parser} parses cannot be enforced"
                raise InvalidParameter("tools", [tool.function.name for tool in tools], limit)
            call = _json_rule(calls_schema(tools, "parameters", "#", strict_only=True))
            calls = f'{call} (";" GAP {call})*' if parallel else call
        return f"{'OTHER_TEXT?' if self.content is None else _content_rule(self.content)} | {calls}"

    def _lark(self, answer: str, field: str) -> StructuredOutputsParams:
        tags = self.tags or ReasoningTags()
        match self.thinking:
            case "never":
                start = "answer"
            case "maybe":
                opening = " | ".join(map(self._marker, tags.opens))
                start = f"(({opening}) until_answer GAP)? answer"
            case "begun":
                start = "until_answer GAP answer"
        lines = [
            "%llguidance {}",
            f"start: {start}",
            f"answer: {answer}",
            self._until("until_answer", tags.closes),
            self._until("until_call", HERMES.opens),
            r"TEXT: /(?s:.*)/",
            r"OTHER_TEXT: /[^{\[\s](?s:.*)/",
            r"GAP: /[ \n]{0,4}/",
        ]
        return StructuredOutputsParams(grammar="\n".join(lines), field=field)

    def _marker(self, marker: str) -> str:
        token = self.token_of(marker)
        return json.dumps(marker) if token is None else f"<[{token}]>"

    def _until(self, rule: str, markers: tuple[str, ...]) -> str:
        """Return a rule for any text up to and including the first of `markers`."""
        if any(self.token_of(marker) is None for marker in markers):
            escaped = "|".join(re.sub(r"[\\.^$*+?{}\[\]|()]", r"\\\g<0>", marker) for marker in markers)
            return f"{rule}[lazy]: {_regex_rule(f'(?s:.*)({escaped})')}"
        return f"{rule}: TEXT ({' | '.join(map(self._marker, markers))})"


def _content_rule(content: StructuredOutputsParams) -> str:
    match content.kind:
        case "json" | "json_object":
            return _json_rule(msgspec.json.decode(content.text))
        case "regex":
            return _regex_rule(content.text)
        case "choice":
            return f"({' | '.join(json.dumps(choice) for choice in content.choice or [])})"
        case "grammar":
            limit = "of another kind where the model may reason or call tools (json, json_object, regex or choice)"
            raise content.invalid(limit)


def _json_rule(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({**without_annotations(schema), 'x-guidance': {'whitespace_pattern': WHITESPACE}})}"


def _regex_rule(regex: str) -> str:
    escaped = re.sub(
        r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), regex, flags=re.DOTALL
    )
    return f"/{escaped}/"


def check_schema(schema: dict[str, Any], field: str) -> None:
    """Raise InvalidParameter for a JSON schema that cannot be enforced."""
    try:
        problem = LLMatcher.validate_grammar(
            LLMatcher.grammar_from_json_schema(without_annotations(schema)), None, limits=limits()
        )
    except BaseException as error:  # noqa: BLE001 - a panic in Rust is no Exception, and concerns this schema only
        problem = str(error) or type(error).__name__
    if problem:
        raise InvalidParameter(field, schema, f"a JSON schema that can be enforced ({one_line(problem)})")


def calls_schema(tools: list[Tool], key: str, pointer: str, *, strict_only: bool) -> dict[str, Any]:
    """Return the JSON schema of a call of one of `tools`.

    key: the model's name for the arguments. pointer: JSON pointer to this schema inside a larger one.
    strict_only: tools that are not strict take any arguments.
    """
    calls = []
    for i, tool in enumerate(tools):
        arguments: dict[str, Any] = {"type": "object"}
        if tool.function.strict or not strict_only:
            arguments = _rebase_refs(tool.arguments_schema, f"{pointer}/anyOf/{i}/properties/{key}")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, key: arguments},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls}


def _rebase_refs(schema: Any, pointer: str) -> Any:
    """Return `schema` with its references to itself changed for its place at `pointer` in a larger schema."""
    if isinstance(schema, list):
        return [_rebase_refs(entry, pointer) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    rebased = {key: _rebase_refs(value, pointer) for key, value in schema.items()}
    reference = rebased.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        rebased["$ref"] = pointer + reference[1:]
    return rebased
