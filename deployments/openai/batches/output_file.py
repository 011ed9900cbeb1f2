"""Answers of a batch: one JSON object per line, appended as they come."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec


class LineResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct):
    code: str
    message: str


class OutputLine(msgspec.Struct):
    """OpenAI's line of an output or error file."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None


class _Answered(msgspec.Struct):
    custom_id: str


class OutputFile:
    """A file that lines are appended to, by one process at a time.

    What a killed process has left is read when the file is opened, and a line that it did not finish is cut off. The
    page cache outlives the process, so nothing is synced until the batch ends: what a power cut takes with it is
    answered again.
    """

    def __init__(self, path: Path):
        self._file = path.open("ab", buffering=0)
        self.custom_ids = _recover(path)

    def append(self, line: OutputLine) -> None:
        """Raises OSError; the file has then to be opened again."""
        rest = memoryview(msgspec.json.encode(line) + b"\n")
        while rest:
            rest = rest[self._file.write(rest) :]
        self.custom_ids.add(line.custom_id)

    def sync(self) -> None:
        """Let all lines outlive a power cut too."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._file.close()


def _recover(path: Path) -> set[str]:
    """Cut off what is no whole line, and return the custom_ids of the others."""
    found, end = set(), 0
    with path.open("r+b") as file:
        for line in file:
            try:
                custom_id = msgspec.json.decode(line, type=_Answered).custom_id
            except (msgspec.DecodeError, UnicodeDecodeError):
                break
            if not line.endswith(b"\n"):
                break
            found.add(custom_id)
            end += len(line)
        file.truncate(end)
    return found
