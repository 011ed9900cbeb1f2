"""What pydantic finds wrong with a body, in one line for the client."""

from __future__ import annotations

import re
from typing import Any

import pydantic

from deployments.openai.unsupported import refusal
from engine.errors import InvalidParameter, RequestError

MAX_ALTERNATIVES = 3
OF_OTHER_BRANCHES = ("missing", "extra_forbidden")  # they tell nothing beside a problem of the same place


def first_problem(error: pydantic.ValidationError) -> RequestError:
    """Names the field, its value and what is expected. `param` is the top-level field."""
    problems: list[Any] = error.errors(include_url=False)
    problem = problems[0]
    field = str(problem["loc"][0]) if problem["loc"] else None
    place = _place(problem["loc"])
    match problem["type"]:
        case "json_invalid":
            return RequestError(f"the body is not valid JSON: {problem['ctx']['error']}")
        case _ if field is None:
            return RequestError("the body must be a JSON object")
        case "missing":
            return RequestError(f"{place} is required", field)
        case "extra_forbidden":
            return RequestError(refusal(place), field)
        case _:
            # of a union, pydantic tells what is wrong with each of its branches
            same = [p for p in problems if _place(p["loc"]) == place and p["type"] not in OF_OTHER_BRANCHES]
            wanted = [_expected(p["msg"]) for p in same]
            limit = " or ".join(list(dict.fromkeys(wanted))[:MAX_ALTERNATIVES])
            wrong = InvalidParameter(place, problem["input"], limit)
            wrong.param = field
            return wrong


def _place(location: tuple[int | str, ...]) -> str:
    """For instance messages[0].role. Names of a union's branches are no part of it."""
    place = ""
    for part in location:
        if isinstance(part, int):
            place += f"[{part}]"
        elif re.fullmatch(r"[a-z_]+", part) is None or part in ("str", "int", "float", "bool"):
            break
        else:
            place += f".{part}" if place else part
    return place


def _expected(message: str) -> str:
    message = message.replace("Input should be ", "").replace("List should have ", "a list of ")
    return re.sub(r" after validation, not \d+$", "", message)
