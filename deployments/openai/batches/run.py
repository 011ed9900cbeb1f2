"""One batch, from its input file to its output files."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Container, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from http import HTTPStatus
from itertools import islice
from pathlib import Path

import msgspec

from deployments.http.in_process import InProcessResponse
from deployments.openai.batches.files import PREFIX as FILE_PREFIX
from deployments.openai.batches.files import check_space
from deployments.openai.batches.input_file import BatchRequest, InputUnreadable, check_requests, read_requests
from deployments.openai.batches.objects import Batch, BatchError, BatchErrors, RequestCounts
from deployments.openai.batches.output_file import LineError, LineResponse, OutputFile, OutputLine
from deployments.openai.batches.records import Record, new_id
from deployments.openai.batches.store import ERRORS, INPUT, OUTPUT, BatchStore
from deployments.openai.batches.store import PREFIX as BATCH_PREFIX

LOOK_S = 0.5  # between two looks at whether the batch is to end
SAVE_S = 1.0  # between two notes of how far it is
UNANSWERED = {
    "batch_cancelled": "This request was not executed, because the batch was cancelled.",
    "batch_expired": "This request could not be executed before the completion window expired.",
}
Send = Callable[[Record[Batch], BatchRequest], "Future[InProcessResponse]"]


class Stopped(Exception):
    """The server stops; another one goes on with the batch."""


@dataclass(slots=True)
class BatchRun:
    """Works on a batch that is claimed, from wherever somebody else has left it. For a thread: it takes long.

    Each answer is appended to the output file, or to the error file, and only there is it known which requests are
    answered. A batch that is seen as `finalizing` or `cancelling` has an answer to every request.
    """

    store: BatchStore
    record: Record[Batch]
    models: Container[str]
    """That are served here."""
    send: Send
    max_in_flight: Callable[[Batch], int]
    """Requests of the batch that may be in the engines now."""
    stopping: Callable[[], bool]
    _saved_at: float = 0.0

    def run(self) -> None:
        """Raises Stopped, and OSError for a disk that is full or fails; the batch can be gone on with later."""
        batch, work = self.record.object, self.store.work(self.record.object.id)
        try:
            if batch.status == "validating":
                self._validate(batch, work / INPUT)
            if batch.status == "in_progress":
                with OutputFile(work / OUTPUT) as output, OutputFile(work / ERRORS) as errors:
                    self._answer(batch, work / INPUT, output, errors)
            if batch.status in ("finalizing", "cancelling"):
                self._publish(batch)
        except InputUnreadable as error:
            self._fail(
                batch, [BatchError("input_file_unreadable", f"The input file cannot be read: {error.strerror}.")]
            )
        shutil.rmtree(work, ignore_errors=True)

    def _validate(self, batch: Batch, file: Path) -> None:
        count, errors = check_requests(file, batch.endpoint, self.models)
        batch.request_counts = RequestCounts(total=count)
        if errors:
            self._fail(batch, errors)
            return
        batch.status, batch.in_progress_at = "in_progress", int(time.time())
        self.store.save(self.record)

    def _fail(self, batch: Batch, errors: list[BatchError]) -> None:
        batch.status, batch.failed_at, batch.errors = "failed", int(time.time()), BatchErrors(errors)
        self.store.save(self.record)

    def _answer(self, batch: Batch, file: Path, output: OutputFile, errors: OutputFile) -> None:
        in_flight: dict[Future[InProcessResponse], BatchRequest] = {}
        left = _unanswered(file, output, errors)
        try:
            while (reason := self._reason_to_end(batch)) is None:
                for request in islice(left, max(0, self.max_in_flight(batch) - len(in_flight))):
                    in_flight[self.send(self.record, request)] = request
                if not in_flight:
                    break
                for future in wait(in_flight, LOOK_S, FIRST_COMPLETED).done:
                    _write(batch, in_flight.pop(future), future.result(), output, errors)
                if time.monotonic() > self._saved_at + SAVE_S:
                    self._save(batch, output, errors)
        finally:
            for future in in_flight:
                future.cancel()
        if reason is not None:
            error = LineError(reason, UNANSWERED[reason])
            for request in _unanswered(file, output, errors):
                errors.append(OutputLine(line_id(batch, request), request.custom_id, None, error))
        now = int(time.time())
        batch.output_file_id = new_id(FILE_PREFIX) if output.custom_ids else None
        batch.error_file_id = new_id(FILE_PREFIX) if errors.custom_ids else None
        if reason == "batch_cancelled":
            batch.status, batch.cancelling_at = "cancelling", self.store.cancelled_at(batch.id)
        else:
            batch.status, batch.finalizing_at = "finalizing", now
            batch.expired_at = now if reason == "batch_expired" else None
        output.sync()
        errors.sync()
        self._save(batch, output, errors)

    def _reason_to_end(self, batch: Batch) -> str | None:
        """Return the error of all requests without an answer if the batch is to end now. Raises Stopped, and OSError if
        the disk is about to be full."""
        if self.stopping():
            raise Stopped
        check_space(self.store.work(batch.id))
        if self.store.cancelled_at(batch.id) is not None:
            return "batch_cancelled"
        return "batch_expired" if time.time() >= batch.expires_at else None

    def _save(self, batch: Batch, output: OutputFile, errors: OutputFile) -> None:
        batch.request_counts.completed, batch.request_counts.failed = len(output.custom_ids), len(errors.custom_ids)
        self.store.save(self.record)
        self._saved_at = time.monotonic()

    def _publish(self, batch: Batch) -> None:
        """Make files of the answers. It may be done again where it did not come to its end."""
        work, owner, seconds = self.store.work(batch.id), self.record.owner, int(batch.output_expires_after["seconds"])
        if batch.output_file_id is not None:
            self.store.files.adopt(work / OUTPUT, batch.output_file_id, owner, f"{batch.id}_output.jsonl", seconds)
        if batch.error_file_id is not None:
            self.store.files.adopt(work / ERRORS, batch.error_file_id, owner, f"{batch.id}_error.jsonl", seconds)
        now = int(time.time())
        if batch.status == "cancelling":
            batch.status, batch.cancelled_at = "cancelled", now
        elif batch.expired_at is not None:
            batch.status = "expired"
        else:
            batch.status, batch.completed_at = "completed", now
        self.store.save(self.record)


def line_id(batch: Batch, request: BatchRequest) -> str:
    """Return the id of a request, the same whenever it is sent."""
    return f"batch_req_{batch.id.removeprefix(BATCH_PREFIX)}_{request.number}"


def _unanswered(file: Path, *answers: OutputFile) -> Iterator[BatchRequest]:
    return (r for r in read_requests(file) if not any(r.custom_id in answered.custom_ids for answered in answers))


def _write(
    batch: Batch, request: BatchRequest, response: InProcessResponse, output: OutputFile, errors: OutputFile
) -> None:
    line = OutputLine(line_id(batch, request), request.custom_id, None, None)
    if response.status == HTTPStatus.REQUEST_TIMEOUT:
        line.error = LineError("request_timeout", "This request was not finished within its deadline.")
    else:
        line.response = LineResponse(response.status, line.id, msgspec.Raw(response.body))
    (output if response.status == HTTPStatus.OK else errors).append(line)
