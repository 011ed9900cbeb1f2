"""Refusals of request bodies: too many values, unsupported fields, and pydantic's errors in one line."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pydantic
from pydantic import JsonValue

from engine.errors import InvalidParameter, RequestError

# Accepted and not used: they promise nothing that is not so. Prefixes are cached by their content, whatever the key.
IGNORED_FIELDS = {"metadata", "prompt_cache_key"}
# Accepted only with a value that means "off", or what this server does anyway.
NEUTRAL_VALUES: dict[str, list[JsonValue]] = {
    "best_of": [1],
    "suffix": [""],
    "functions": [],
    "function_call": ["none", "auto"],
    "modalities": [["text"]],
    "use_beam_search": [False],
    "length_penalty": [1, 1.0],
    "spaces_between_special_tokens": [True],
    "store": [False],
    "service_tier": ["auto", "default"],
    "prompt_cache_retention": ["in_memory"],
    "verbosity": ["medium"],
}
REPLACEMENTS = {"functions": "tools", "function_call": "tool_choice"}  # OpenAI replaced these fields long ago

# Limits on values in a body, each by a byte that every such value has one of: parsing takes time for values, not for
# bytes, and keeps the GIL. Texts have such bytes too: where a plain count is above a limit, strings are left out.
MAX_VALUES = {
    b"{": (8_192, "objects"),
    b"[": (16_384, "lists"),
    b":": (65_536, "members of objects"),
    b",": (2**20, "values"),
}

MAX_ALTERNATIVES = 3
UNION_NOISE = ("missing", "extra_forbidden")  # they add nothing to another problem of the same path


def has_no_effect(name: str, value: JsonValue) -> bool:
    """Return whether the field may be dropped without the client noticing."""
    return name in IGNORED_FIELDS or (name in NEUTRAL_VALUES and value in NEUTRAL_VALUES[name])


def validation_error(error: pydantic.ValidationError) -> RequestError:
    """Return an error that names the field, its value and the expected values. `param` is the top-level field."""
    problems: list[Any] = error.errors(include_url=False)
    first = problems[0]
    field = str(first["loc"][0]) if first["loc"] else None
    path = _path(first["loc"])
    match first["type"]:
        case "json_invalid":
            return RequestError(f"the body is not valid JSON: {first['ctx']['error']}")
        case _ if field is None:
            return RequestError("the body must be a JSON object")
        case "missing":
            return RequestError(f"{path} is required", field)
        case "extra_forbidden":
            return RequestError(_unsupported_message(path), field)
        case _:
            # pydantic reports a problem for each branch of a union
            same = [p for p in problems if _path(p["loc"]) == path and p["type"] not in UNION_NOISE]
            expected = [_expected(p["msg"]) for p in same]
            limit = " or ".join(list(dict.fromkeys(expected))[:MAX_ALTERNATIVES])
            invalid = InvalidParameter(path, first["input"], limit)
            invalid.param = field
            return invalid


def _unsupported_message(name: str) -> str:
    if name in REPLACEMENTS:
        return f"{name} is not supported by this server; use {REPLACEMENTS[name]}"
    if name in NEUTRAL_VALUES:
        return f"{name} is only supported with the value {' or '.join(map(json.dumps, NEUTRAL_VALUES[name]))}"
    return f"{name} is not supported by this server"


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


def _expected(message: str) -> str:
    message = message.replace("Input should be ", "").replace("List should have ", "a list of ")
    return re.sub(r" after validation, not \d+$", "", message)


async def check_json_size(body: bytes) -> None:
    """Raises RequestError for a body of too many values, whether it is valid JSON or not."""
    if any(body.count(byte) > limit for byte, (limit, _) in MAX_VALUES.items()):
        await asyncio.to_thread(_check_outside_strings, body)


def _check_outside_strings(body: bytes) -> None:
    counts = dict.fromkeys(MAX_VALUES, 0)
    start = 0
    while start < len(body):
        quote = body.find(b'"', start)
        end = len(body) if quote < 0 else quote
        for byte, (limit, what) in MAX_VALUES.items():
            counts[byte] += body.count(byte, start, end)
            if counts[byte] > limit:
                raise RequestError(f"the body has more than {limit} {what}, the limit of this server")
        start = _end_of_string(body, end)


def _end_of_string(body: bytes, quote: int) -> int:
    """Return the position after the string that begins at `quote`, or the end of a body that ends inside it."""
    end = body.find(b'"', quote + 1)
    while end > 0:
        backslashes = end
        while body[backslashes - 1] == ord("\\"):
            backslashes -= 1
        if (end - backslashes) % 2 == 0:
            return end + 1
        end = body.find(b'"', end + 1)
    return len(body)
