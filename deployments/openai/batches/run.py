"""One batch, from its input file to its output files."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from itertools import chain

import msgspec

from deployments.http.in_process import InProcessResponse
from deployments.openai.batches.files import PREFIX as FILE_PREFIX
from deployments.openai.batches.files import check_space
from deployments.openai.batches.input_file import BatchRequest, InputFile, InputUnreadable
from deployments.openai.batches.objects import Batch, BatchError, BatchErrors, RequestCounts
from deployments.openai.batches.output_file import LineError, LineResponse, OutputFile, OutputLine
from deployments.openai.batches.records import Record, new_id
from deployments.openai.batches.store import ERRORS, INPUT, OUTPUT, BatchStore
from deployments.openai.batches.store import PREFIX as BATCH_PREFIX
from deployments.openai.batches.threads import in_thread

POLL_S = 0.5  # between two looks at whether the batch is to end
SAVE_S = 1.0  # between two notes of how far it is
MAX_CRASHES = 2  # of servers, while they worked on the same line
MAX_IN_FLIGHT_BYTES = 32 * 2**20  # of the bodies of one batch; a single one may have more
CRASHED = "The server has ended twice while it worked on line {line} of this batch, or on one that ran beside it."
UNANSWERED = {
    "batch_cancelled": "This request was not executed, because the batch was cancelled.",
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_failed": "This request was not executed, because the batch failed.",
}
Send = Callable[[Record[Batch], BatchRequest], Awaitable[InProcessResponse]]


@dataclass(slots=True)
class BatchRun:
    """Works on a batch that is claimed, from wherever somebody else has left it.

    Each answer is appended to the output file, or to the error file, and only there is it known which requests are
    answered. A batch that is seen as `finalizing` or `cancelling` has an answer to every request.
    """

    store: BatchStore
    record: Record[Batch]
    models: Container[str]
    """That are served here."""
    max_body_bytes: int
    send: Send
    max_in_flight: Callable[[Batch], int]
    """Requests of the batch that may be in the engines now."""
    _saved_at: float = 0.0
    _line: int = 0
    """The first line that is being worked on."""

    async def run(self) -> None:
        """Raises OSError for a disk that is full or fails. The batch can be resumed later, also after a cancellation of
        this task."""
        batch, work = self.record.object, self.store.work(self.record.object.id)
        file = InputFile(work / INPUT, self.max_body_bytes)
        try:
            if batch.status == "validating":
                await self._validate(batch, file)
            if batch.status == "in_progress":
                output, errors = await in_thread(lambda: (OutputFile(work / OUTPUT), OutputFile(work / ERRORS)))
                with output, errors:
                    await self._answer(batch, file, output, errors)
            if batch.status in ("finalizing", "cancelling"):
                await in_thread(self._publish, batch)
        except InputUnreadable as error:
            message = f"The input file cannot be read: {error.strerror}."
            await in_thread(self._fail, batch, [BatchError("input_file_unreadable", message)])
        await in_thread(shutil.rmtree, work, ignore_errors=True)

    async def _validate(self, batch: Batch, file: InputFile) -> None:
        async with self._attempt(0) as crashes:
            if crashes >= MAX_CRASHES:
                batch.request_counts, errors = RequestCounts(), [BatchError("server_error", CRASHED.format(line=1))]
            else:
                count, errors = await file.check(batch.endpoint, self.models)
                batch.request_counts = RequestCounts(total=count)
            if errors:
                await in_thread(self._fail, batch, errors)
                return
            batch.status, batch.in_progress_at = "in_progress", int(time.time())
            await in_thread(self.store.save, self.record)

    @asynccontextmanager
    async def _attempt(self, line: int) -> AsyncGenerator[int]:
        """Yield how often a server has ended in here while the batch was at this line."""
        batch_id, self._line = self.record.object.id, line
        crashes = await in_thread(self.store.begin_attempt, batch_id, line)
        try:
            yield crashes
        except (Exception, asyncio.CancelledError):
            await in_thread(self.store.end_attempt, batch_id)
            raise
        await in_thread(self.store.end_attempt, batch_id)

    def _fail(self, batch: Batch, errors: list[BatchError]) -> None:
        batch.status, batch.failed_at, batch.errors = "failed", int(time.time()), BatchErrors(errors)
        self.store.save(self.record)

    async def _answer(self, batch: Batch, file: InputFile, output: OutputFile, errors: OutputFile) -> None:
        left = _unanswered(file, output, errors)
        first = await in_thread(next, left, None)
        number = 0 if first is None else first.number
        async with self._attempt(number) as crashes:
            if first is None or crashes < MAX_CRASHES:
                reason = await self._send_all(batch, chain([] if first is None else [first], left), output, errors)
            else:
                reason = "batch_failed"
                batch.errors = BatchErrors([BatchError("server_error", CRASHED.format(line=number), None, number)])
        await in_thread(self._finish, batch, reason, file, output, errors)

    async def _send_all(
        self, batch: Batch, left: Iterator[BatchRequest], output: OutputFile, errors: OutputFile
    ) -> str | None:
        """Return why the batch ends before all requests have an answer; None if they have. Raises OSError if the disk
        is about to be full."""
        in_flight: dict[asyncio.Future[InProcessResponse], BatchRequest] = {}
        done: set[asyncio.Future[InProcessResponse]] = set()
        try:
            while True:
                answers = [(in_flight.pop(future), future.result()) for future in done]
                reason = await in_thread(self._write, batch, answers, output, errors)
                if reason is not None:
                    return reason
                for request in await in_thread(self._take, left, list(in_flight.values())):
                    in_flight[asyncio.ensure_future(self.send(self.record, request))] = request
                if not in_flight:
                    return None
                done, _ = await asyncio.wait(in_flight, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in in_flight:
                future.cancel()
            await asyncio.gather(*in_flight, return_exceptions=True)

    def _take(self, left: Iterator[BatchRequest], in_flight: list[BatchRequest]) -> list[BatchRequest]:
        """Return the requests to be sent now, and note the line where the batch is."""
        count, size = self.max_in_flight(self.record.object) - len(in_flight), sum(len(r.body) for r in in_flight)
        taken: list[BatchRequest] = []
        while len(taken) < count and size < MAX_IN_FLIGHT_BYTES and (request := next(left, None)) is not None:
            taken.append(request)
            size += len(request.body)
        line = min((request.number for request in [*in_flight, *taken]), default=0)
        if line > self._line:
            self.store.begin_attempt(self.record.object.id, line)
            self._line = line
        return taken

    def _write(
        self,
        batch: Batch,
        answers: list[tuple[BatchRequest, InProcessResponse]],
        output: OutputFile,
        errors: OutputFile,
    ) -> str | None:
        """Append answers, and return the reason if the batch is to end now. Raises OSError if the disk is about to be
        full."""
        for request, response in answers:
            _append(batch, request, response, output, errors)
        if time.monotonic() > self._saved_at + SAVE_S:
            self._save(batch, output, errors)
        check_space(self.store.work(batch.id))
        if self.store.cancelled_at(batch.id) is not None:
            return "batch_cancelled"
        return "batch_expired" if time.time() >= batch.expires_at else None

    def _finish(
        self, batch: Batch, reason: str | None, file: InputFile, output: OutputFile, errors: OutputFile
    ) -> None:
        """Give every request an answer. reason: the error of those that have none."""
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
        elif batch.errors is not None:
            batch.status, batch.failed_at = "failed", now
        else:
            batch.status, batch.completed_at = "completed", now
        self.store.save(self.record)


def line_id(batch: Batch, request: BatchRequest) -> str:
    """Return the id of a request, the same whenever it is sent."""
    return f"batch_req_{batch.id.removeprefix(BATCH_PREFIX)}_{request.number}"


def _unanswered(file: InputFile, *answers: OutputFile) -> Iterator[BatchRequest]:
    return (r for r in file.requests() if not any(r.custom_id in answered.custom_ids for answered in answers))


def _append(
    batch: Batch, request: BatchRequest, response: InProcessResponse, output: OutputFile, errors: OutputFile
) -> None:
    line = OutputLine(line_id(batch, request), request.custom_id, None, None)
    if response.status == HTTPStatus.REQUEST_TIMEOUT:
        line.error = LineError("request_timeout", "This request was not finished within its deadline.")
    else:
        line.response = LineResponse(response.status, line.id, msgspec.Raw(response.body))
    (output if response.status == HTTPStatus.OK else errors).append(line)
