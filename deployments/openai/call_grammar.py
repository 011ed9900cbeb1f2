"""Grammars of the tool calls of each model family, in llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from deployments.openai.conversation import Tool
from deployments.openai.parsers.tools.argument_types import argument_types
from engine.errors import InvalidParameter
from engine.grammars.json_schema import Schema, SchemaBuilder, enforceable
from engine.grammars.value_types import concerns, possible_types

_OF_ARGUMENTS = {"type", "properties", "required", "additionalProperties"}
"""Keywords that are enforced for arguments between tags."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Templates of calls. Placeholders in braces: `name`, `arguments` in JSON, `parameters` between tags, the whole
    call as a JSON `object`, a `number`, a `gap` of white space."""

    begin: str
    """Text before the first of several calls; empty if every call stands alone."""
    call: str
    between: str = ""
    end: str = ""
    parameter: str = ""
    """Text before a value between tags: {key} is its name, {is_text} whether it is text rather than JSON."""
    value_end: str = ""


@dataclass(slots=True)
class Lark:
    """Builds rules. `lines` collects the definitions that the returned rules refer to."""

    markers: Iterable[str]
    """Texts that may be single tokens."""
    token_of: Callable[[str], int | None]
    """Returns the id of a marker's token, or None if the marker is plain text."""
    closed: bool = True
    """Whether objects are closed as in SchemaBuilder."""
    lines: list[str] = field(default_factory=list)

    def text(self, text: str) -> str:
        return " ".join(f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in self._parts(text))

    def json(self, schema: dict[str, Any]) -> str:
        """Return a rule for JSON of this schema. Raises SchemaError."""
        return json_rule(enforceable(schema, closed=self.closed))

    def until(self, *ends: str) -> str:
        """Return a rule for any text up to and including whichever of `ends` comes first."""
        rule, parts = f"until_{len(self.lines)}", [self._parts(end) for end in ends]
        if all(any(isinstance(part, int) for part in end) for end in parts):
            self.lines.append(f"{rule}: {' | '.join(map(self._until_token, parts))}")
        else:
            escaped = "|".join(map(_escape, ends))
            self.lines.append(f"{rule}[lazy]: {regex_rule(f'(?s:.*)({escaped})')}")
        return rule

    def _parts(self, text: str) -> list[str | int]:
        """Split a text into plain text and the ids of its marker tokens."""
        tokens = {marker: token for marker in self.markers if (token := self.token_of(marker)) is not None}
        parts = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
        return [tokens.get(part, part) for part in parts if part]

    @staticmethod
    def _until_token(end: list[str | int]) -> str:
        """Return a rule for free text up to and including `end`, which contains a special token. Free text cannot
        contain that token, because regular expressions never match special tokens. If `end` has literal text before the
        token, free text must end before that literal text."""
        before = end[0] if isinstance(end[0], str) else ""
        rest = end[1:] if before else end
        parts = [f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in rest]
        return " ".join([regex_rule(f"(?s:.*){_escape(before)}"), *parts])


@dataclass(slots=True)
class CallGrammar:
    syntax: CallSyntax
    lark: Lark
    tools: list[Tool]
    strict_only: bool
    """Whether tools that are not strict take any arguments."""

    @property
    def opener(self) -> str:
        """Text with which calls begin, and which occurs nowhere else."""
        return re.split("[{\n]|(?<=>)", self.syntax.begin or self.syntax.call)[0]

    def calls(self, *, parallel: bool, opened: bool = False) -> str:
        """Return the rule for one or more calls. opened: whether the opener has already been written."""
        syntax = self.syntax
        head = (syntax.begin or syntax.call)[len(self.opener) if opened else 0 :]
        if not syntax.begin:
            first = self._call(head)
            return f"{first} (GAP {self._call(syntax.call)})*" if parallel and not opened else first
        call = self._call(syntax.call)
        more = f"({self._text(syntax.between)} {call})*" if parallel else ""
        return f"{self._text(head)} {call} {more} {self._text(syntax.end)}"

    def _call(self, template: str) -> str:
        """Return the rule for a call of any of the tools."""
        if "{object}" in template:
            return self._text(template, object=calls_rule(self.lark, self.tools, "arguments", self.strict_only))
        rules = []
        for i, tool in enumerate(self.tools):
            free = self.strict_only and not tool.function.strict
            parts = {"name": json.dumps(tool.function.name)}
            if "{arguments}" in template:
                parts["arguments"] = self.lark.json({"type": "object"} if free else tool.arguments_schema)
                rules.append(self._text(template, **parts))
                continue
            before, after = template.split("{parameters}")
            field = f"tools[{i}].function.parameters" if tool.function.strict else None
            parameters = self._any_parameters() if free else self._parameters(tool.arguments_schema, field)
            rules.append(f"{self._text(before, **parts)} {parameters} {self._text(after)}")
        return f"({' | '.join(rules)})"

    def _parameters(self, schema: dict[str, Any], field: str | None) -> str:
        """Return the rule for arguments between tags, in the order of the schema.

        field: path of the schema if it must be enforced strictly, else None. Raises InvalidParameter.
        """
        builder = SchemaBuilder(closed=self.lark.closed)
        converted = builder.resolved(builder.add(schema))
        if not isinstance(converted, dict) or converted.keys() - _OF_ARGUMENTS:
            if field is None:
                return self._any_parameters()
            raise InvalidParameter(
                field, schema, "an object with plain properties, because this model does not write arguments as JSON"
            )
        rules = []
        for key, value in converted.get("properties", {}).items():
            if value is not False:
                is_text = "string" in argument_types(schema, key)
                before = self.syntax.parameter.format(key=key, is_text=str(is_text).lower())
                rule = f"{self.lark.text(before)} {self._value(value, builder, key, field, is_text)}"
                rules.append(rule if key in converted.get("required", ()) else f"({rule})?")
        return " ".join(rules)

    def _any_parameters(self) -> str:
        templates = dict.fromkeys(self.syntax.parameter.replace("{is_text}", word) for word in ("true", "false"))
        before = " | ".join(self._text(template, key='/[^<>"]+/') for template in templates)
        return f"(({before}) {self.lark.until(self.syntax.value_end)})*"

    def _value(self, schema: Schema, builder: SchemaBuilder, key: str, field: str | None, is_text: bool) -> str:
        end = self.syntax.value_end
        if not is_text:
            return f"{json_rule(builder.document(schema))} {self.lark.text(end)}"
        values = _all_values(schema, builder)
        if values is not None:
            texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
            return f"({' | '.join(self.lark.text(text + end) for text in texts)})"
        if field and (unknown := _asserted_of_texts(schema, builder)):
            limit = (
                f"without {', '.join(sorted(unknown))}, which cannot be enforced because this model "
                "writes the value as plain text"
            )
            raise InvalidParameter(f"{field}.properties.{key}", schema, limit)
        return self.lark.until(end)

    def _text(self, template: str, **parts: str) -> str:
        known = {"gap": "GAP", "number": "/[0-9]{1,4}/", **parts}
        pieces = re.split(r"\{(\w+)\}", template)
        return " ".join(known[piece] if i % 2 else self.lark.text(piece) for i, piece in enumerate(pieces) if piece)


def json_rule(document: str) -> str:
    """Return a rule for JSON. document: schema as `enforceable` returns it."""
    return f"%json {document}"


def regex_rule(regex: str) -> str:
    escaped = re.sub(
        r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), regex, flags=re.DOTALL
    )
    return f"/{escaped}/"


def _escape(text: str) -> str:
    return re.sub(r"[\\.^$*+?{}\[\]|()]", r"\\\g<0>", text)


def calls_rule(lark: Lark, tools: list[Tool], key: str, strict_only: bool, **array: Any) -> str:
    """Return the rule for a call of one of `tools` as JSON, or for an array of calls. Raises SchemaError.

    key: the model's name for the arguments. strict_only: whether tools that are not strict take any arguments. array:
    keywords of the array; none for one call.
    """
    free = {tool.function.name for tool in tools if strict_only and not tool.function.strict}
    schemas = {tool.function.name: tool.arguments_schema for tool in tools}
    text = json.dumps({name: {"type": "object"} if name in free else schema for name, schema in schemas.items()})
    return json_rule(_calls_document(text, key, lark.closed, tuple(array.items())))


@lru_cache(32)  # agents send the same tools with each turn
def _calls_document(schemas: str, key: str, closed: bool, array: tuple[tuple[str, int], ...]) -> str:
    """schemas: object of the arguments' schemas by the names of the tools, as JSON."""
    builder, calls = SchemaBuilder(closed=closed), []
    for name, schema in json.loads(schemas).items():
        properties = {"name": {"const": name}, key: builder.add(schema)}
        required = ["name", key]
        calls.append({"type": "object", "properties": properties, "required": required, "additionalProperties": False})
    call = {"anyOf": calls}
    return builder.document({"type": "array", **dict(array), "items": call} if array else call)


def _all_values(schema: Schema, builder: SchemaBuilder) -> list[Any] | None:
    """Return all values that a converted schema allows; None if it does not list them."""
    found = builder.resolved(schema)
    if not isinstance(found, dict):
        return None
    if found.keys() <= {"type", "enum", "const"} and found.keys() & {"enum", "const"}:
        return [found["const"]] if "const" in found else list(found["enum"])
    if found.keys() == {"anyOf"}:
        lists = [_all_values(branch, builder) for branch in found["anyOf"]]
        return None if None in lists else [value for values in lists for value in values or ()]
    kinds: dict[str, list[Any]] = {"null": [None], "boolean": [True, False]}
    return kinds.get(str(found.get("type"))) if len(found) == 1 else None


def _asserted_of_texts(schema: Schema, builder: SchemaBuilder) -> set[str]:
    """Return the keywords that assert something about a text."""
    found = builder.resolved(schema)
    if not isinstance(found, dict) or "string" not in possible_types(found):
        return set()
    own = {key for key in found.keys() - {"type", "anyOf", "allOf"} if concerns(key, frozenset({"string"}))}
    branches = [*found.get("anyOf", ()), *found.get("allOf", ())]
    return own.union(*(_asserted_of_texts(branch, builder) for branch in branches))
