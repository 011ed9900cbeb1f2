"""Refusals of request bodies: too many values, unsupported fields, and pydantic's errors as one line."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import pydantic
from pydantic import JsonValue

from engine.errors import InvalidParameter, RequestError

UnknownFields = Literal["ignore", "refuse"]
NOTHING: list[JsonValue] = [False, {}, []]
HEADER_SAFE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_NAMED = 20

# Limits on the values in a body, counted by a byte that occurs once per value: the time to parse depends on values, not
# on bytes, and parsing holds the GIL. Strings may contain such bytes too, so they are left out if a plain count exceeds
# a limit.
MAX_VALUES = {
    b"{": (8_192, "objects"),
    b"[": (16_384, "lists"),
    b":": (65_536, "members of objects"),
    b",": (2**20, "values"),
}
PIECE_BYTES = 65_536
_COUNTER = ThreadPoolExecutor(1, "body-size")  # one thread: several would only compete for the GIL

MAX_ALTERNATIVES = 3
# rewrites pydantic's messages so that they fit after "must be", without the value that was found
WORDINGS = [
    (re.compile(pattern, re.DOTALL), wording)
    for pattern, wording in (
        (r"^Input should be ", ""),
        (r"^String should have ", "a text of "),
        (r"^String should match ", "a text matching "),
        (r"^List should have ", "a list of "),
        (r"^Dictionary should have ", "an object of "),
        (r"^Unable to extract tag using discriminator '(\w+)'$", r"an object with a \1"),
        (r"^Input tag .* using '(\w+)' does not match any of the expected tags: ", r"an object whose \1 is one of "),
        (r"( after validation, not \S+|, unable to .*|, got a number .*)$", ""),
    )
]
UNION_NOISE = ("missing", "extra_forbidden")  # not worth reporting besides another problem at the same path


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFields:
    """Fields that an API defines but no route here supports, each with the reason."""

    unused: Mapping[str, str] = field(default_factory=dict)
    """Fields dropped silently: leaving them out changes nothing."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Fields ignored with a Warning header; the request succeeds."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Fields refused, because the answer would not be what the client expects if they were ignored."""
    neutral: Mapping[str, list[JsonValue]] = field(default_factory=dict)
    """Values, besides those in NOTHING, with which ignored and refused fields have no effect. Such fields are dropped
    silently."""

    def drop(
        self, body: dict[str, Any], known: Container[str], unknown_fields: UnknownFields
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the body without the dropped fields, and the names of the fields about which the client is warned."""
        kept, ignored = {}, []
        for name, value in body.items():
            if name in known:
                kept[name] = value
            elif name in self.unused or self._is_neutral(name, value):
                continue
            elif name in self.ignored or (unknown_fields == "ignore" and name not in self.refused):
                ignored.append(name)
            else:
                kept[name] = value  # pydantic refuses it
        return kept, ignored

    def refusal(self, name: str) -> str:
        reason = f": {self.refused[name]}" if name in self.refused else ""
        return f"{name} is not supported by this server{reason}"

    def _is_neutral(self, name: str, value: JsonValue) -> bool:
        return (name in self.ignored or name in self.refused) and value in [*NOTHING, *self.neutral.get(name, [])]


def warning(ignored: list[str]) -> str:
    """Return the value of a Warning header (RFC 7234, 5.5) for ignored fields."""
    named = [name for name in ignored if HEADER_SAFE.fullmatch(name)][:MAX_NAMED]
    rest = len(ignored) - len(named)
    return f'299 manta "ignored: {", ".join([*named, f"{rest} more"] if rest else named)}"'


def validation_error(error: pydantic.ValidationError, foreign: ForeignFields) -> RequestError:
    """Return an error that names the field, its value and the expected values. `param` is the top-level field."""
    problems: list[Any] = error.errors(include_url=False)
    first = problems[0]
    name = str(first["loc"][0]) if first["loc"] else None
    path = _path(first["loc"])
    match first["type"]:
        case "json_invalid":
            return RequestError(f"the body is not valid JSON: {first['ctx']['error']}")
        case _ if name is None:
            return RequestError("the body must be a JSON object")
        case "missing":
            return RequestError(f"{path} is required", name)
        case "extra_forbidden":
            return RequestError(foreign.refusal(path), name)
        case _:
            # pydantic reports a problem for each branch of a union
            same = [p for p in problems if _path(p["loc"]) == path and p["type"] not in UNION_NOISE]
            limit = " or ".join(list(dict.fromkeys(expected(p["msg"]) for p in same))[:MAX_ALTERNATIVES])
            invalid = InvalidParameter(path, first["input"], limit)
            invalid.param = name
            return invalid


def _path(location: tuple[int | str, ...]) -> str:
    """Return a path like messages[0].role, without the names of a union's branches."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif re.fullmatch(r"[a-z_]+", part) is None or part in ("str", "int", "float", "bool"):
            break
        else:
            path += f".{part}" if path else part
    return path


def expected(message: str) -> str:
    """Return what a value should be, according to a message of pydantic."""
    for pattern, wording in WORDINGS:
        message = pattern.sub(wording, message)
    return message


async def check_json_size(body: bytes) -> None:
    """Raise RequestError if the body has too many values, whether or not it is valid JSON."""
    if any(body.count(byte) > limit for byte, (limit, _) in MAX_VALUES.items()):
        await asyncio.get_running_loop().run_in_executor(_COUNTER, _check_outside_strings, body)


def _check_outside_strings(body: bytes) -> None:
    """Count outside strings, in pieces of about a millisecond so that the event loop can run in between. The counts are
    exact up to the first invalid JSON, where parsers stop."""
    counts = dict.fromkeys(MAX_VALUES, 0)
    in_string, after_backslash = 0, False
    for start in range(0, len(body), PIECE_BYTES):
        piece = body[start + after_backslash : start + PIECE_BYTES].replace(b"\\\\", b"")
        after_backslash = piece.endswith(b"\\")
        parts = piece.replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[in_string::2])
        in_string ^= (len(parts) - 1) % 2
        for byte, (limit, what) in MAX_VALUES.items():
            counts[byte] += outside.count(byte)
            if counts[byte] > limit:
                raise RequestError(f"the body has more than {limit} {what}, the limit of this server")
