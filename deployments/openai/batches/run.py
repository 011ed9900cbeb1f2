"""Runs one batch, from its input file to its output files."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Container, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from http import HTTPStatus
from itertools import chain
from pathlib import Path

import msgspec

from deployments.http.in_process import InProcessResponse
from deployments.jobs.errors import LeaseLost
from deployments.jobs.lease import RETRY_S
from deployments.openai.batches.files import PREFIX as FILE_PREFIX
from deployments.openai.batches.files import check_space
from deployments.openai.batches.input_file import BatchRequest, InputFile, InputUnreadable
from deployments.openai.batches.objects import Batch, BatchError, BatchErrors, RequestCounts
from deployments.openai.batches.output_file import ERRORS, OUTPUT, BatchOutputLine, LineError, LineResponse, OutputFiles
from deployments.openai.batches.records import Record, new_id
from deployments.openai.batches.store import INPUT, BatchLease, BatchStore
from deployments.openai.batches.store import PREFIX as BATCH_PREFIX
from deployments.openai.batches.threads import in_thread
from deployments.storage.key_value import StoreUnavailable

POLL_S = 0.5  # between saves of the batch's progress, and checks whether it should end
MAX_CRASHES = 2  # of servers while working on the same line
MAX_IN_FLIGHT_BYTES = 32 * 2**20  # of bodies per batch; a single body may exceed it
CRASHED = "The server has ended twice while it worked on this batch, perhaps because of line {line}."
UNANSWERED = {
    "batch_cancelled": "This request was not executed, because the batch was cancelled.",
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_failed": "This request was not executed, because the batch failed.",
}
Send = Callable[[Record[Batch], BatchRequest], Awaitable[InProcessResponse]]


@dataclass(slots=True)
class BatchRun:
    """Works on a claimed batch, and continues where another ingress stopped.

    Each answer is appended to the output or the error file. These files are the only record of which requests are
    answered. A batch whose status is `finalizing` or `cancelling` gets an answer to every request.
    """

    store: BatchStore
    claim: BatchLease
    models: Container[str]
    """Names of the models served here."""
    max_body_bytes: int
    send: Send
    max_in_flight: Callable[[Batch], int]
    """Returns how many requests of the batch may be in the engines now."""
    leave: Callable[[], None] = lambda: None
    """Called before requests end that will be sent again when the batch is resumed."""
    _polled_at: float = 0.0

    async def run(self) -> None:
        """Run the batch. The batch can be resumed later if this run fails or is cancelled. Raises OSError if the disk
        is full or fails, StoreUnavailable, and LeaseLost if another ingress has taken the batch over."""
        try:
            await self._run(self.claim.record.object)
        except (Exception, asyncio.CancelledError):
            self.claim.record.working = False
            with suppress(StoreUnavailable, LeaseLost):
                await self.claim.save()
            raise

    async def _run(self, batch: Batch) -> None:
        work = self.store.work(batch.id)
        file = InputFile(work / INPUT, self.max_body_bytes)
        try:
            if batch.status == "validating":
                await self._validate(batch, file)
            if batch.status == "in_progress":
                with closing(await in_thread(self._open, work)) as answers:
                    await self._answer(batch, file, answers)
            if batch.status in ("finalizing", "cancelling"):
                await self._publish(batch, work)
        except InputUnreadable as error:
            message = f"The input file cannot be read: {error.strerror}."
            await self._fail(batch, [BatchError("input_file_unreadable", message)])
        await self.store.finish(batch.id)

    def _open(self, work: Path) -> OutputFiles:
        """Open the files of a new attempt. The attempt takes effect when the record is saved."""
        attempt = secrets.token_hex(8)
        answers = OutputFiles(work, attempt, self.claim.record.attempt)
        self.claim.record.attempt = attempt
        return answers

    async def _validate(self, batch: Batch, file: InputFile) -> None:
        if await self._begin(0) >= MAX_CRASHES:
            batch.request_counts, errors = RequestCounts(), [BatchError("server_error", CRASHED.format(line=1))]
        else:
            count, errors = await file.check(batch.endpoint, self.models)
            batch.request_counts = RequestCounts(total=count)
        if errors:
            await self._fail(batch, errors)
            return
        batch.status, batch.in_progress_at = "in_progress", int(time.time())
        self.claim.record.working = False
        await self._save()

    async def _begin(self, line: int) -> int:
        """Record that work on the batch begins. Returns how many ingresses have died while `line` was the batch's first
        unanswered line."""
        record = self.claim.record
        record.crashes = int(record.working) + (record.crashes if record.working and record.line == line else 0)
        record.line, record.working = line, True
        await self._save()
        return record.crashes

    async def _save(self, answers: OutputFiles | None = None) -> None:
        """Save the record, retrying until the store is available. Raises LeaseLost."""
        if answers is not None:
            counts = self.claim.record.object.request_counts
            counts.completed, counts.failed = len(answers.output.custom_ids), len(answers.errors.custom_ids)
        while True:
            try:
                await self.claim.save()
                return
            except StoreUnavailable:
                await asyncio.sleep(RETRY_S)

    async def _fail(self, batch: Batch, errors: list[BatchError]) -> None:
        batch.status, batch.failed_at, batch.errors = "failed", int(time.time()), BatchErrors(errors)
        await self._save()

    async def _answer(self, batch: Batch, file: InputFile, answers: OutputFiles) -> None:
        left = (request for request in file.requests() if request not in answers)
        first = await in_thread(next, left, None)
        number = 0 if first is None else first.number
        if await self._begin(number) >= MAX_CRASHES and first is not None:
            batch.errors = BatchErrors([BatchError("server_error", CRASHED.format(line=number), None, number)])
            await self._save()  # before any line has this error
        reason: str | None = "batch_failed"
        if batch.errors is None:
            reason = await self._send_all(batch, chain([] if first is None else [first], left), answers)
        await in_thread(_write_rest, batch, reason, file, answers)
        await self._finish(batch, reason, answers)

    async def _send_all(self, batch: Batch, left: Iterator[BatchRequest], answers: OutputFiles) -> str | None:
        """Send all remaining requests. Returns why the batch ends early, or None once all have an answer. Raises
        OSError if the disk is almost full."""
        in_flight: dict[asyncio.Future[InProcessResponse], BatchRequest] = {}
        done: set[asyncio.Future[InProcessResponse]] = set()
        try:
            while True:
                new = [(in_flight.pop(future), future.result()) for future in done]
                await in_thread(self._write, batch, new, answers)
                if (reason := await self._poll(batch, answers)) is not None:
                    return reason
                for request in await in_thread(self._take, left, list(in_flight.values())):
                    in_flight[asyncio.ensure_future(self.send(self.claim.record, request))] = request
                if not in_flight:
                    return None
                done, _ = await asyncio.wait(in_flight, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            self.leave()
            raise
        finally:
            for future in in_flight:
                future.cancel()
            await asyncio.gather(*in_flight, return_exceptions=True)

    def _take(self, left: Iterator[BatchRequest], in_flight: list[BatchRequest]) -> list[BatchRequest]:
        """Return the requests to send now."""
        batch = self.claim.record.object
        count, size = self.max_in_flight(batch) - len(in_flight), sum(len(r.body) for r in in_flight)
        taken: list[BatchRequest] = []
        while len(taken) < count and size < MAX_IN_FLIGHT_BYTES and (request := next(left, None)) is not None:
            taken.append(request)
            size += len(request.body)
        return taken

    def _write(self, batch: Batch, new: list[tuple[BatchRequest, InProcessResponse]], answers: OutputFiles) -> None:
        """Append answers. Raises OSError if the disk is almost full."""
        for request, response in new:
            line = BatchOutputLine(line_id(batch, request), request.custom_id, None, None)
            if response.status == HTTPStatus.REQUEST_TIMEOUT:
                line.error = LineError("request_timeout", "This request was not finished within its deadline.")
            else:
                line.response = LineResponse(response.status, line.id, msgspec.Raw(response.body))
            (answers.output if response.status == HTTPStatus.OK else answers.errors).append(line)
        check_space(self.store.work(batch.id))

    async def _poll(self, batch: Batch, answers: OutputFiles) -> str | None:
        """Save the progress every POLL_S. Returns the reason if the batch has to end now."""
        if time.monotonic() > self._polled_at + POLL_S:
            await self._save(answers)
            self._polled_at = time.monotonic()
            with suppress(StoreUnavailable):
                batch.cancelling_at = await self.store.cancelled_at(batch.id)
        if batch.cancelling_at is not None:
            return "batch_cancelled"
        return "batch_expired" if time.time() >= batch.expires_at else None

    async def _finish(self, batch: Batch, reason: str | None, answers: OutputFiles) -> None:
        now = int(time.time())
        batch.output_file_id = new_id(FILE_PREFIX) if answers.output.custom_ids else None
        batch.error_file_id = new_id(FILE_PREFIX) if answers.errors.custom_ids else None
        if reason == "batch_cancelled":
            batch.status = "cancelling"
        else:
            batch.status, batch.finalizing_at, batch.cancelling_at = "finalizing", now, None
            batch.expired_at = now if reason == "batch_expired" else None
        self.claim.record.working = False
        await self._save(answers)

    async def _publish(self, batch: Batch, work: Path) -> None:
        """Turn the answers into files. If interrupted, it can be repeated."""
        adopt, owner, attempt = self.store.files.adopt, self.claim.record.owner, self.claim.record.attempt
        seconds = int(batch.output_expires_after["seconds"])
        if batch.output_file_id is not None:
            await adopt(work / OUTPUT.format(attempt), batch.output_file_id, owner, f"{batch.id}_output.jsonl", seconds)
        if batch.error_file_id is not None:
            await adopt(work / ERRORS.format(attempt), batch.error_file_id, owner, f"{batch.id}_error.jsonl", seconds)
        now = int(time.time())
        if batch.status == "cancelling":
            batch.status, batch.cancelled_at = "cancelled", now
        elif batch.expired_at is not None:
            batch.status = "expired"
        elif batch.errors is not None:
            batch.status, batch.failed_at = "failed", now
        else:
            batch.status, batch.completed_at = "completed", now
        await self._save()


def line_id(batch: Batch, request: BatchRequest) -> str:
    """Return the id of a request, the same each time it is sent."""
    return f"batch_req_{batch.id.removeprefix(BATCH_PREFIX)}_{request.number}"


def _write_rest(batch: Batch, reason: str | None, file: InputFile, answers: OutputFiles) -> None:
    """Give every remaining request an answer. reason: the error that these requests get."""
    if reason is not None:
        error = LineError(reason, UNANSWERED[reason])
        for request in file.requests():
            if request not in answers:
                answers.errors.append(BatchOutputLine(line_id(batch, request), request.custom_id, None, error))
    answers.output.sync()
    answers.errors.sync()
