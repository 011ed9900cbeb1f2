"""The form that an output must have. Names and meaning follow vLLM's StructuredOutputsParams."""

from __future__ import annotations

import re
from typing import Any, Literal, cast

import msgspec

from engine.errors import InvalidParameter

Kind = Literal["json", "regex", "choice", "grammar", "json_object"]
KINDS: tuple[Kind, ...] = ("json", "regex", "choice", "grammar", "json_object")
MAX_CHARS = 200_000
MAX_GBNF_CHARS = 20_000  # GBNF is translated to Lark in Python
GBNF = re.compile(r"^[^\S\n]*[\w-]+\s*::=", re.MULTILINE)  # the beginning of a rule, which Lark does not have
LARK = re.compile(r"^[^\S\n]*(?:%|[?!]*start\b[^:\n]*:)", re.MULTILINE)


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form of one output: exactly one field, else InvalidParameter is raised. Only compilation in the engine shows
    whether the form can be enforced."""

    json: str | dict[str, Any] | None = None
    """A JSON schema, as an object or as text. A keyword that cannot be enforced is an error, never ignored."""
    disable_additional_properties: bool | None = None
    """Whether an object whose schema lists properties, and says nothing of others, has no others. None: as in the
    engine's configuration."""
    regex: str | None = None
    """A regular expression for the whole output, in Rust's syntax: no look-around and no back references."""
    choice: list[str] | None = None
    """Texts of which the output must be one."""
    grammar: str | None = None
    """A context-free grammar: llguidance's Lark (with a rule `start`) or llama.cpp's GBNF (with a rule `root`)."""
    json_object: bool = False
    """Whether the output must be a JSON object, of any content."""
    field: str = "structured_outputs"
    """Name of these parameters in the user's request, for error messages."""

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            limit = f"an object with exactly one of {', '.join(KINDS)}"
            raise InvalidParameter(self.field, {kind: getattr(self, kind) for kind in given}, limit)
        if self.choice is not None and not (self.choice and all(self.choice)):
            raise self.invalid("a list of at least one text, none of them empty")
        max_chars = MAX_GBNF_CHARS if self.is_gbnf else MAX_CHARS
        if len(self.text) > max_chars:
            raise self.invalid(f"at most {max_chars} characters (these are {len(self.text)})")
        try:
            msgspec.msgpack.encode(self.json)  # the wire format, whose integers have at most 64 bits
        except OverflowError:
            raise self.invalid("a JSON schema whose integers have at most 64 bits") from None

    @property
    def kind(self) -> Kind:
        return self._given()[0]

    @property
    def text(self) -> str:
        """Text to compile; schemas and choices as JSON."""
        value = getattr(self, self.kind)
        if self.kind in ("regex", "grammar"):
            return cast(str, value)
        if self.kind == "json_object":
            return '{"type": "object"}'
        try:
            if isinstance(value, str):
                value = msgspec.json.decode(value)
            if self.kind == "json" and not isinstance(value, dict):
                raise self.invalid("a JSON object")
            return msgspec.json.encode(value).decode()
        except (msgspec.MsgspecError, RecursionError, TypeError, ValueError) as error:
            raise self.invalid(f"valid JSON ({error})") from None

    @property
    def is_gbnf(self) -> bool:
        return self.grammar is not None and bool(GBNF.search(self.grammar) or not LARK.search(self.grammar))

    def invalid(self, limit: str) -> InvalidParameter:
        """Return an error which says that this value must be `limit`."""
        field = f"{self.field}.{self.kind}" if self.field == "structured_outputs" else self.field
        return InvalidParameter(field, getattr(self, self.kind), limit)

    def _given(self) -> list[Kind]:
        return [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
