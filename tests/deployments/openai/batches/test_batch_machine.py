"""Whatever kills the process that works on a batch, and wherever: each line is answered once."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BytesIO
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deployments.http.in_process import InProcessResponse
from deployments.jobs.lease import lease_key
from deployments.openai.batches.errors import Conflict
from deployments.openai.batches.files import MAX_AGE_S
from deployments.openai.batches.input_file import BatchRequest
from deployments.openai.batches.objects import ENDED, Batch, BatchBody
from deployments.openai.batches.output_file import BatchOutputLine, OutputFile
from deployments.openai.batches.records import Record
from deployments.openai.batches.run import MAX_CRASHES, UNANSWERED, BatchRun
from deployments.openai.batches.store import BatchStore
from deployments.storage.memory import MemoryStore
from tests.deployments.openai.batches.batches import jsonl, line

MAX_OPERATIONS = 60  # of the file system, more than a batch of MAX_LINES needs
MAX_LINES = 6
STATUSES = [200, 400, 408, 500]


class Killed(BaseException):
    """Stands for SIGKILL: no handler of errors sees it."""


@contextmanager
def killed_after(operations: int, torn: int) -> Iterator[None]:
    """Let the process die in place of the next operation on the disk or in the store but so many. torn: bytes of a line
    that are written then."""
    left = operations

    def check() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed

    def dying(work: Callable[..., object]) -> Callable[..., object]:
        def operate(*args: object, **kwargs: object) -> object:
            check()
            return work(*args, **kwargs)

        return operate

    def append(self: OutputFile, line: BatchOutputLine) -> None:
        try:
            check()
        except Killed:
            text = msgspec.json.encode(line)
            self._file.write(text[: torn % (len(text) + 1)])
            raise
        real_append(self, line)

    def remove_one_by_one(folder: Path, **_: object) -> None:
        if folder.exists():
            for path in sorted(folder.iterdir()):
                dying(path.unlink)()
            folder.rmdir()

    real_append = OutputFile.append
    with ExitStack() as patches:
        for owner, name, work in [
            (OutputFile, "append", append),
            (shutil, "rmtree", remove_one_by_one),
            *((os, name, dying(getattr(os, name))) for name in ("fsync", "link")),
            *((MemoryStore, name, dying(getattr(MemoryStore, name))) for name in ("set", "add", "replace", "delete")),
        ]:
            patches.enter_context(mock.patch.object(owner, name, work))
        patches.enter_context(suppress(Killed))
        yield


class BatchMachine(RuleBasedStateMachine):
    """A batch, processes that work on it and die, and a client that may cancel it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.values = MemoryStore(2**24)
        self.store = BatchStore(self.folder, self.values)
        self.now, self.kills = time.time(), 0
        self.clock = mock.patch.object(time, "time", side_effect=lambda: self.now)
        self.clock.start()

    @initialize(statuses=st.lists(st.sampled_from(STATUSES), min_size=1, max_size=MAX_LINES))
    def create(self, statuses: list[int]) -> None:
        self.statuses = {f"line {i}": status for i, status in enumerate(statuses)}
        self.batch_id = asyncio.run(self.start(BytesIO(jsonl(*map(line, self.statuses)))))

    async def start(self, content: BytesIO) -> str:
        file = await self.store.files.upload(content, None, "in.jsonl", MAX_AGE_S)
        body = BatchBody(input_file_id=file.id, endpoint="/v1/completions", completion_window="1h")
        return (await self.store.create(body, None, None)).id

    async def send(self, _: Record[Batch], request: BatchRequest) -> InProcessResponse:
        return InProcessResponse(self.statuses[request.custom_id], body=b"{}")

    async def work(self) -> None:
        claim = await self.store.claim(self.batch_id)
        if claim is not None:
            assert await BatchStore(self.folder, self.values).claim(self.batch_id) is None
            async with claim.held():
                await BatchRun(self.store, claim, ("fake",), 2**20, self.send, lambda _: 2).run()

    @rule(operations=st.integers(0, MAX_OPERATIONS), torn=st.integers(0, 1000))
    def work_and_die(self, operations: int, torn: int) -> None:
        self.kills += 1
        with killed_after(operations, torn):
            asyncio.run(self.work())
            self.kills -= 1
        asyncio.run(self.values.delete(lease_key(self.batch_id)))  # it expires

    @rule(garbage=st.binary(max_size=40), kept=st.integers(0, 2000))
    @precondition(lambda self: self.batch.status == "in_progress")
    def lose_power(self, garbage: bytes, kept: int) -> None:
        """What was not synced may be lost, and what never was written may take its place."""
        for path in self.store.work(self.batch_id).glob("output-*"):
            with path.open("r+b") as file:
                file.truncate(kept)
                file.seek(0, os.SEEK_END)
                file.write(b"\0" + garbage)

    @rule()
    def cancel(self) -> None:
        with suppress(Conflict):
            assert asyncio.run(self.store.cancel(self.batch_id, None)).status in ("cancelling", "cancelled")

    @rule()
    def let_time_pass(self) -> None:
        self.now += 1000

    @property
    def batch(self) -> Batch:
        return asyncio.run(self.store.get(self.batch_id, None))

    @invariant()
    def counts_never_exceed_the_lines(self) -> None:
        if hasattr(self, "batch_id"):
            counts = self.batch.request_counts
            assert counts.completed + counts.failed <= len(self.statuses)

    def teardown(self) -> None:
        try:
            if hasattr(self, "batch_id"):
                asyncio.run(self.work())
                self.check_the_end()
        finally:
            self.clock.stop()
            shutil.rmtree(self.folder)

    def check_the_end(self) -> None:
        batch, files = self.batch, self.store.files
        assert batch.status in ENDED and (batch.status != "failed" or self.kills >= MAX_CRASHES)
        assert not self.store.work(self.batch_id).exists()
        if batch.in_progress_at is None:
            return  # it was killed while its lines were checked
        found: dict[str, BatchOutputLine] = {}
        for file_id in (batch.output_file_id, batch.error_file_id):
            path = asyncio.run(files.content(file_id, None))[1] if file_id else None
            for text in path.read_bytes().splitlines() if path else ():
                answer = msgspec.json.decode(text, type=BatchOutputLine)
                assert answer.custom_id not in found
                found[answer.custom_id] = answer
                unanswered = answer.error is not None and answer.error.code in UNANSWERED
                assert (file_id == batch.output_file_id) == (
                    answer.response is not None and not unanswered and answer.response.status_code == 200
                )
        assert found.keys() == self.statuses.keys()
        assert batch.request_counts.completed + batch.request_counts.failed == batch.request_counts.total
        if batch.status == "completed":
            for custom_id, answer in found.items():
                status = 408 if answer.response is None else answer.response.status_code
                assert status == self.statuses[custom_id]


TestBatchMachine = BatchMachine.TestCase
TestBatchMachine.settings = settings(max_examples=25, stateful_step_count=8)


@pytest.mark.parametrize("third", range(30))
def test_a_batch_that_ended_two_servers_has_failed_whenever_the_third_one_dies(third):
    machine = BatchMachine()
    machine.create([200])
    for operations in (24, 12, third):  # twice at the same line
        machine.work_and_die(operations, 0)
        machine.counts_never_exceed_the_lines()
    machine.teardown()
