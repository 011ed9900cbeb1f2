"""Answers of a batch: one JSON object per line, appended as they arrive."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from deployments.openai.batches.input_file import BatchRequest
from engine.user_folder import new_private_file

OUTPUT, ERRORS = "output-{}.jsonl", "errors-{}.jsonl"  # file names, filled with the name of an attempt


class LineResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct):
    code: str
    message: str


class BatchOutputLine(msgspec.Struct):
    """A line of an output or error file, as in OpenAI's API."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None


class _Answered(msgspec.Struct):
    custom_id: str


class OutputFile:
    """A file to which one process at a time appends lines.

    It begins with the complete lines of the previous attempt's file. The process of that attempt may still be alive and
    append to its own file. Nothing is synced until the batch ends: the page cache survives the end of a process, and
    answers lost in a power cut are computed again.
    """

    def __init__(self, path: Path, predecessor: Path):
        self.custom_ids: set[str] = set()
        self._file = open(path, "xb", buffering=0, opener=new_private_file)  # noqa: SIM115  `close` does
        try:
            self._copy(predecessor)
        except OSError:
            self._file.close()
            raise

    def append(self, line: BatchOutputLine) -> None:
        """Append a line. Raises OSError; the file must then be reopened."""
        self._write(msgspec.json.encode(line) + b"\n", line.custom_id)

    def sync(self) -> None:
        """Make all lines survive a power cut."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _write(self, text: bytes, custom_id: str) -> None:
        rest = memoryview(text)
        while rest:
            rest = rest[self._file.write(rest) :]
        self.custom_ids.add(custom_id)

    def _copy(self, path: Path) -> None:
        with suppress(FileNotFoundError), path.open("rb") as file:
            for line in file:
                try:
                    custom_id = msgspec.json.decode(line, type=_Answered).custom_id
                except (msgspec.DecodeError, UnicodeDecodeError):
                    return
                if not line.endswith(b"\n"):
                    return
                self._write(line, custom_id)


class OutputFiles:
    """The two files of one attempt at a batch: one for answers with status 200, one for all others."""

    def __init__(self, work: Path, attempt: str, predecessor: str):
        self.output = OutputFile(work / OUTPUT.format(attempt), work / OUTPUT.format(predecessor))
        self.errors = OutputFile(work / ERRORS.format(attempt), work / ERRORS.format(predecessor))

    def __contains__(self, request: BatchRequest) -> bool:
        return request.custom_id in self.output.custom_ids or request.custom_id in self.errors.custom_ids

    def close(self) -> None:
        self.output.close()
        self.errors.close()
