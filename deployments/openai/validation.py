"""Refusals of request bodies: too many values, unsupported fields, and pydantic's errors in one line."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Container
from typing import Any, Literal

import pydantic
from pydantic import JsonValue

from engine.errors import InvalidParameter, RequestError

# Fields of OpenAI's and vLLM's that no route here has. A value that asks for nothing is dropped without a word.
NEUTRAL_VALUES: dict[str, list[JsonValue]] = {
    "best_of": [1],
    "function_call": ["none", "auto"],
    "functions": [[]],
    "modalities": [["text"]],
    "length_penalty": [1, 1.0],
    "prompt_cache_retention": ["in_memory"],
    "spaces_between_special_tokens": [True],
    "suffix": [""],
    "verbosity": ["medium"],
}
NOTHING: list[JsonValue] = [False, {}, []]  # neutral for all of them
# They promise nothing that is not so.
UNUSED = {"metadata": "nothing is stored", "prompt_cache_key": "prefixes are cached by content, whatever the key"}
# Ignored, and a Warning header says so: the answer is of the kind that was asked for all the same.
IGNORED = {
    "best_of": "the first `n` answers are returned",
    "guided_decoding_backend": "there is one",
    "guided_whitespace_pattern": "JSON is written compactly",
    "kv_transfer_params": "the server decides where a prompt is computed",
    "length_penalty": "it is for beam search",
    "media_io_kwargs": "there are only texts",
    "mm_processor_kwargs": "there are only texts",
    "moderation": "nothing is moderated",
    "prediction": "it would make the answer faster, not different",
    "prompt_cache_options": "prefixes are cached as long as there is room",
    "prompt_cache_retention": "prefixes are cached as long as there is room",
    "repetition_detection": "an answer ends at its end or at `max_tokens`",
    "spaces_between_special_tokens": "tokens are joined as they are",
    "store": "nothing is stored",
    "thinking_token_budget": "`max_tokens` limits reasoning and answer together",
    "verbosity": "the model is not told",
    "vllm_xargs": "they are for plugins of vLLM's",
    "watermarking": "answers have no watermark",
    "web_search_options": "nothing is searched",
}
# Refused: without them the answer would be of another kind, or to another question.
REFUSED = {
    "audio": "answers are text",
    "chat_template": "the template in the model's folder is used",
    "documents": "put them into the messages",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "logits_processors": "no code of a request is run",
    "modalities": "answers are text",
    "prompt_embeds": "prompts are text or token ids",
    "return_tokens_as_token_ids": "use return_token_ids of completions",
    "suffix": "text is only added at the end",
    "truncate_prompt_tokens": "a prompt is taken whole or not at all",
    "truncation_side": "a prompt is taken whole or not at all",
    "use_beam_search": "answers are sampled",
    # of completions here, and of vLLM's chat too
    "add_special_tokens": "the chat template brings them",
    "echo": "only completions have it",
    "prompt_logprobs": "only completions have it",
    "return_token_ids": "only completions have it",
}
UnknownFields = Literal["ignore", "refuse"]
HEADER_SAFE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_NAMED = 20

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


def without_foreign(
    body: dict[str, Any], known: Container[str], unknown_fields: UnknownFields
) -> tuple[dict[str, Any], list[str]]:
    """Return the body without the fields that are dropped, and the names of those whose client has to be warned."""
    kept, ignored = {}, []
    for name, value in body.items():
        if name in known:
            kept[name] = value
        elif name in UNUSED or _is_neutral(name, value):
            continue
        elif name in IGNORED or (unknown_fields == "ignore" and name not in REFUSED):
            ignored.append(name)
        else:
            kept[name] = value  # pydantic refuses it
    return kept, ignored


def warning(ignored: list[str]) -> str:
    """Return the value of the header Warning (RFC 7234, 5.5) for fields that were ignored."""
    named = [name for name in ignored if HEADER_SAFE.fullmatch(name)][:MAX_NAMED]
    rest = len(ignored) - len(named)
    return f'299 manta "ignored: {", ".join([*named, f"{rest} more"] if rest else named)}"'


def _is_neutral(name: str, value: JsonValue) -> bool:
    return (name in IGNORED or name in REFUSED) and value in [*NOTHING, *NEUTRAL_VALUES.get(name, [])]


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
    if name in REFUSED:
        return f"{name} is not supported by this server: {REFUSED[name]}"
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
