"""The requests of a batch: one JSON object per line."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from deployments.openai.batches.objects import BatchError

MAX_LINES = 50_000  # OpenAI's limit
MAX_ERRORS = 1_000  # that are told
MAX_CUSTOM_ID = 512
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class InputUnreadable(OSError):
    """The file cannot be read any more."""


class _Line(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


class _Body(msgspec.Struct):
    model: Any = None
    stream: Any = None


@dataclass(frozen=True, slots=True)
class BatchRequest:
    number: int
    """The number of its line, from 1."""
    custom_id: str
    body: bytes


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """Read a file that was checked. Raises InputUnreadable."""
    for number, text in _lines(path):
        line = msgspec.json.decode(text, type=_Line)
        yield BatchRequest(number, line.custom_id, bytes(line.body))


def first_model(path: Path) -> str | None:
    """Return the model that the first line names. Raises InputUnreadable."""
    for _, text in _lines(path):
        try:
            model = msgspec.json.decode(msgspec.json.decode(text, type=_Line).body, type=_Body).model
        except NOT_JSON:
            return None
        return model if isinstance(model, str) else None
    return None


def check_requests(path: Path, endpoint: str, models: Container[str]) -> tuple[int, list[BatchError]]:
    """Return the number of requests, and what is wrong with their lines. Raises InputUnreadable.

    What only the route can say of a body becomes the answer to that line. models: that are served here.
    """
    model, seen, count = first_model(path), set[str](), 0
    errors: list[BatchError] = []
    for number, text in _lines(path):
        count += 1
        if count > MAX_LINES:
            message = f"The batch input file contains more than {MAX_LINES} requests, which is the limit."
            return count, [BatchError("too_many_tasks", message)]
        if len(errors) < MAX_ERRORS:
            error = _line_error(text, endpoint, seen) or _body_error(text, model, models)
            if error is not None:
                error.line = number
                errors.append(error)
    if not count:
        errors.append(BatchError("empty_file", "The input file is empty: a batch needs at least one request."))
    return count, errors


def _line_error(text: bytes, endpoint: str, seen: set[str]) -> BatchError | None:
    try:
        line = msgspec.json.decode(text, type=_Line)
    except msgspec.ValidationError:
        return BatchError("invalid_json_line", "This line is not a JSON object.")
    except NOT_JSON:
        return BatchError("invalid_json_line", "This line is not parseable as valid JSON.")
    body = bytes(line.body)
    given = {**msgspec.structs.asdict(line), "body": None if body in (b"", b"null") else body}
    for name, value in given.items():
        if value is None:
            return BatchError("missing_required_parameter", f"Missing required parameter: '{name}'.", name)
    custom_id = line.custom_id
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        return BatchError(
            "invalid_custom_id", f"The custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters.", "custom_id"
        )
    if custom_id in seen:
        message = "The custom_id for this request is a duplicate of another request. It must be unique in a batch."
        return BatchError("duplicate_custom_id", message, "custom_id")
    seen.add(custom_id)
    if line.method != "POST":
        return BatchError("invalid_method", "The method must be 'POST'.", "method")
    if line.url != endpoint:
        message = f"The URL provided for this request does not match the batch endpoint '{endpoint}'."
        return BatchError("url_mismatch", message, "url")
    return None


def _body_error(text: bytes, model: str | None, models: Container[str]) -> BatchError | None:
    try:
        body = msgspec.json.decode(msgspec.json.decode(text, type=_Line).body, type=_Body)
    except NOT_JSON:
        return BatchError("invalid_body", "The body must be a JSON object.", "body")
    if body.stream:
        return BatchError("invalid_body", "The answer to a request in a batch cannot be streamed.", "body.stream")
    if body.model != model:
        return BatchError("model_mismatch", "All requests in a batch must name the same model.", "body.model")
    if isinstance(model, str) and model and model not in models:
        return BatchError("model_not_found", f"The model '{model[:100]}' is not served here.", "body.model")
    return None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise InputUnreadable(error.errno, error.strerror, error.filename) from None
