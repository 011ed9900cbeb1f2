"""What pydantic finds wrong with a body, in one line for the client."""

from __future__ import annotations

import re
from typing import Any

import pydantic

from deployments.openai.unsupported import unsupported_message
from engine.errors import InvalidParameter, RequestError

MAX_ALTERNATIVES = 3
UNION_NOISE = ("missing", "extra_forbidden")  # they add nothing to another problem of the same path


def validation_error(error: pydantic.ValidationError) -> RequestError:
    """Names the field, its value and what is expected. `param` is the top-level field."""
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
            return RequestError(unsupported_message(path), field)
        case _:
            # of a union, pydantic tells what is wrong with each of its branches
            same = [p for p in problems if _path(p["loc"]) == path and p["type"] not in UNION_NOISE]
            wanted = [_expected(p["msg"]) for p in same]
            limit = " or ".join(list(dict.fromkeys(wanted))[:MAX_ALTERNATIVES])
            wrong = InvalidParameter(path, first["input"], limit)
            wrong.param = field
            return wrong


def _path(location: tuple[int | str, ...]) -> str:
    """For instance messages[0].role. Names of a union's branches are no part of it."""
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
