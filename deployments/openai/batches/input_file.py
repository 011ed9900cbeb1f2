"""Requests of a batch: one JSON object per line."""

from __future__ import annotations

import errno
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from deployments.http.validation import check_json_size
from deployments.openai.batches.objects import BatchError
from deployments.openai.batches.threads import in_thread
from engine.errors import RequestError

MAX_LINES = 50_000  # OpenAI's limit
MAX_ERRORS = 1_000  # errors reported per file
MAX_CUSTOM_ID = 512
MAX_ENVELOPE_BYTES = 8192  # of a line besides its body: MAX_CUSTOM_ID escaped characters, and field names
PIECE_BYTES = 2**20  # of lines read by one call in a thread
SMALL_BYTES = 2**16  # size up to which a line is decoded without checking it first
NumberedLine = tuple[int, bytes | None]
"""A line number, from 1, and the line; None for a line that is too long."""
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class InputUnreadable(OSError):
    """The file can no longer be read."""


class _Line(msgspec.Struct):
    """A line whose fields are not decoded yet."""

    custom_id: msgspec.Raw = msgspec.Raw()
    method: msgspec.Raw = msgspec.Raw()
    url: msgspec.Raw = msgspec.Raw()
    body: msgspec.Raw = msgspec.Raw()


class _Body(msgspec.Struct):
    model: msgspec.Raw = msgspec.Raw()
    stream: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True, slots=True)
class BatchRequest:
    number: int
    """The number of its line, from 1."""
    custom_id: str
    body: bytes


class InputFile:
    """An uploaded batch input. Lines are read up to a limit, so that a thread holds at most one line of that size."""

    def __init__(self, path: Path, max_body_bytes: int):
        """max_body_bytes: limit on a request's body."""
        self._path, self.max_line_bytes = path, max_body_bytes + MAX_ENVELOPE_BYTES

    def requests(self) -> Iterator[BatchRequest]:
        """Yield the requests of a checked file. Raises InputUnreadable."""
        for number, text in self._lines():
            if text is None:
                raise InputUnreadable(errno.EFBIG, f"line {number} is longer than {self.max_line_bytes} bytes")
            line = msgspec.json.decode(text, type=_Line)
            yield BatchRequest(number, msgspec.json.decode(line.custom_id, type=str), bytes(line.body))

    async def model(self) -> str | None:
        """Return the model named in the first line; None if it names none or is invalid. Raises InputUnreadable."""
        first = await in_thread(next, self._lines(), None)
        if first is None or first[1] is None:
            return None
        try:
            if await _is_too_large(first[1]):
                return None
            return _text(msgspec.json.decode(msgspec.json.decode(first[1], type=_Line).body, type=_Body).model)
        except NOT_JSON:
            return None

    async def check(self, endpoint: str, models: Container[str]) -> tuple[int, list[BatchError]]:
        """Return the number of requests, and the errors of their lines. Raises InputUnreadable.

        Some errors in a body are found only by its route; they become the answer to that line. models: names of the
        models served here.
        """
        check = _LineCheck(endpoint, models, await self.model(), self.max_line_bytes)
        lines, count = self._lines(), 0
        errors: list[BatchError] = []
        while piece := await in_thread(_piece, lines):
            count += len(piece)
            if count > MAX_LINES:
                message = f"The batch input file contains more than {MAX_LINES} requests, which is the limit."
                return count, [BatchError("too_many_tasks", message)]
            if len(errors) < MAX_ERRORS:
                too_large = {number for number, text in piece if await _is_too_large(text)}
                errors += await in_thread(check.errors, piece, too_large)
        errors = errors[:MAX_ERRORS]
        if not count:
            errors.append(BatchError("empty_file", "The input file is empty: a batch needs at least one request."))
        return count, errors

    def _lines(self) -> Iterator[NumberedLine]:
        """Yield the lines that are not blank."""
        limit, number = self.max_line_bytes, 0
        try:
            with self._path.open("rb") as file:
                while line := file.readline(limit + 1):
                    number += 1
                    if len(line) <= limit or line.endswith(b"\n"):
                        if line.strip():
                            yield number, line
                        continue
                    while (rest := file.readline(PIECE_BYTES)) and not rest.endswith(b"\n"):
                        pass
                    yield number, None
        except OSError as error:
            raise InputUnreadable(error.errno, error.strerror, error.filename) from None


@dataclass(slots=True)
class _LineCheck:
    endpoint: str
    models: Container[str]
    model: str | None
    """The model of the batch."""
    max_line_bytes: int
    seen: set[str] = field(default_factory=set)
    """All custom_ids of earlier lines."""

    def errors(self, lines: list[NumberedLine], too_large: Container[int]) -> list[BatchError]:
        """Return the errors of these lines. too_large: numbers of the lines with too many values."""
        found = []
        for number, text in lines:
            if text is None:
                limit = f"{self.max_line_bytes} bytes, the limit of this server"
                error: BatchError | None = BatchError("line_too_long", f"This line is longer than {limit}.")
            elif number in too_large:
                error = BatchError("invalid_body", "This line has more values than this server reads.", "body")
            else:
                error = self._error(text)
            if error is not None:
                error.line = number
                found.append(error)
        return found

    def _error(self, text: bytes) -> BatchError | None:
        try:
            line = msgspec.json.decode(text, type=_Line)
        except msgspec.ValidationError:
            return BatchError("invalid_json_line", "This line is not a JSON object.")
        except NOT_JSON:
            return BatchError("invalid_json_line", "This line is not parseable as valid JSON.")
        for name, value in msgspec.structs.asdict(line).items():
            if not _is_given(value):
                return BatchError("missing_required_parameter", f"Missing required parameter: '{name}'.", name)
        custom_id = _text(line.custom_id)
        if custom_id is None or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
            return BatchError(
                "invalid_custom_id", f"The custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters.", "custom_id"
            )
        if custom_id in self.seen:
            message = "The custom_id for this request is a duplicate of another request. It must be unique in a batch."
            return BatchError("duplicate_custom_id", message, "custom_id")
        self.seen.add(custom_id)
        if _text(line.method) != "POST":
            return BatchError("invalid_method", "The method must be 'POST'.", "method")
        if _text(line.url) != self.endpoint:
            message = f"The URL provided for this request does not match the batch endpoint '{self.endpoint}'."
            return BatchError("url_mismatch", message, "url")
        return self._body_error(line.body)

    def _body_error(self, text: msgspec.Raw) -> BatchError | None:
        try:
            body = msgspec.json.decode(text, type=_Body)
        except NOT_JSON:
            return BatchError("invalid_body", "The body must be a JSON object.", "body")
        if _is_given(body.stream) and bytes(body.stream) != b"false":
            return BatchError("invalid_body", "The answer to a request in a batch cannot be streamed.", "body.stream")
        model = _text(body.model) if _is_given(body.model) else None
        if model != self.model or (model is None and _is_given(body.model)):
            return BatchError("model_mismatch", "All requests in a batch must name the same model.", "body.model")
        if model and model not in self.models:
            return BatchError("model_not_found", f"The model '{model[:100]}' is not served here.", "body.model")
        return None


async def _is_too_large(text: bytes | None) -> bool:
    """Return whether a line has more values than a body may have. The values are counted before any is decoded."""
    if text is None or len(text) <= SMALL_BYTES:
        return False
    try:
        await check_json_size(text)
    except RequestError:
        return True
    return False


def _piece(lines: Iterator[NumberedLine]) -> list[NumberedLine]:
    """Return the next lines, about PIECE_BYTES in all."""
    found, size = [], 0
    for number, text in lines:
        found.append((number, text))
        size += PIECE_BYTES if text is None else len(text)
        if size >= PIECE_BYTES:
            break
    return found


def _is_given(value: msgspec.Raw) -> bool:
    return bytes(value) not in (b"", b"null")


def _text(value: msgspec.Raw) -> str | None:
    """Return the text of a field; None if its value is not text."""
    try:
        return msgspec.json.decode(value, type=str)
    except NOT_JSON:
        return None
