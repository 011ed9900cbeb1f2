from __future__ import annotations

import asyncio
import shutil
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from deployments.http.in_process import InProcessResponse
from deployments.jobs.errors import LeaseLost
from deployments.jobs.lease import lease_key
from deployments.openai.batches.files import MAX_AGE_S
from deployments.openai.batches.input_file import BatchRequest, InputFile
from deployments.openai.batches.objects import Batch, BatchBody
from deployments.openai.batches.output_file import BatchOutputLine
from deployments.openai.batches.records import Record
from deployments.openai.batches.run import BatchRun
from deployments.openai.batches.store import INPUT, BatchLease, BatchStore
from deployments.storage.memory import MemoryStore
from tests.deployments.fake_api import until
from tests.deployments.openai.batches.batches import jsonl, line

MAX_BODY_BYTES = 2**20
FULL, ROOMY = SimpleNamespace(free=0), SimpleNamespace(free=2**40)


class World:
    """A batch of three lines. `answers` are given to them; those without one stay in flight. Servers that have died
    hold no lease any more."""

    def __init__(self, folder: Path):
        self.values = MemoryStore(2**20)
        self.store = BatchStore(folder, self.values)
        self.answers = {"a": 200, "b": 200, "c": 200}
        self.sent: list[str] = []
        self.in_flight: list[asyncio.Future[InProcessResponse]] = []
        self.batch_id = asyncio.run(self.create())

    async def create(self) -> str:
        file = await self.store.files.upload(BytesIO(jsonl(*map(line, "abc"))), None, "in.jsonl", MAX_AGE_S)
        body = BatchBody(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        return (await self.store.create(body, None, None)).id

    def send(self, _: Record[Batch], request: BatchRequest) -> asyncio.Future[InProcessResponse]:
        future: asyncio.Future[InProcessResponse] = asyncio.Future()
        self.sent.append(request.custom_id)
        self.in_flight.append(future)
        if request.custom_id in self.answers:
            future.set_result(InProcessResponse(self.answers[request.custom_id], body=b"{}"))
        return future

    async def begin(self) -> None:
        await self.values.delete(lease_key(self.batch_id))
        claim = await self.store.claim(self.batch_id)
        assert claim is not None
        async with claim.held():
            await self.run(claim)

    async def run(self, claim: BatchLease) -> None:
        await BatchRun(self.store, claim, (), MAX_BODY_BYTES, self.send, lambda _: 1).run()

    def work(self) -> None:
        asyncio.run(asyncio.wait_for(self.begin(), 30))

    @property
    def batch(self) -> Batch:
        return asyncio.run(self.store.get(self.batch_id, None))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_server_that_stops_gives_up_what_is_in_flight_and_the_next_one_sends_only_that(world):
    async def stop() -> None:
        working = asyncio.create_task(world.begin())
        await until(lambda: world.sent == ["a", "b"])
        working.cancel()
        await asyncio.wait([working])
        assert world.in_flight[-1].cancelled()

    del world.answers["b"]
    asyncio.run(stop())
    world.answers["b"] = 200
    world.work()
    assert world.sent == ["a", "b", "b", "c"]
    assert world.batch.request_counts.completed == 3


def test_a_batch_pauses_while_the_disk_is_full(world, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: FULL)
    with pytest.raises(OSError, match="No space left on device"):
        world.work()
    assert (world.batch.status, world.sent) == ("in_progress", [])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: ROOMY)
    world.work()
    assert world.batch.status == "completed"


def test_a_batch_whose_input_is_gone_has_failed_and_says_why(world):
    (world.store.work(world.batch_id) / INPUT).unlink()
    world.work()
    assert world.batch.status == "failed" and world.batch.errors is not None
    assert world.batch.errors.data[0].message == "The input file cannot be read: No such file or directory."


def test_a_line_that_took_too_long_has_an_error_without_a_response(world):
    world.answers["b"] = 408
    world.work()
    assert world.batch.error_file_id is not None
    _, path = asyncio.run(world.store.files.content(world.batch.error_file_id, None))
    answer = msgspec.json.decode(path.read_bytes(), type=BatchOutputLine)
    assert answer.error is not None
    assert (answer.custom_id, answer.response, answer.error.code) == ("b", None, "request_timeout")


async def test_only_one_of_several_servers_works_on_a_batch(world, tmp_path):
    other = BatchStore(tmp_path, world.values)
    claim = await world.store.claim(world.batch_id)
    assert claim is not None
    async with claim.held():
        assert await other.claim(world.batch_id) is None
    assert await other.claim(world.batch_id) is not None


def test_a_server_that_was_taken_for_dead_leaves_no_line_in_the_output_of_the_one_that_took_over(world):
    """It is as slow as can be: its first answer comes after another one has ended the batch."""

    async def scenario() -> None:
        claim = await world.store.claim(world.batch_id)
        assert claim is not None
        slow = asyncio.create_task(world.run(claim))
        await until(lambda: world.sent == ["a"])
        of_slow = world.in_flight[0]
        world.answers["a"] = 200
        await world.begin()
        of_slow.set_result(InProcessResponse(500, body=b"{}"))
        with pytest.raises((LeaseLost, OSError)):
            await slow

    del world.answers["a"]
    asyncio.run(scenario())
    assert (world.batch.status, world.batch.request_counts.completed) == ("completed", 3)
    assert world.sent[:4] == ["a", "a", "b", "c"]


def test_what_was_left_of_a_batch_that_is_not_stored_is_removed_after_a_day(world):
    folder = world.store.work(f"batch_{0:032x}")
    folder.mkdir()
    asyncio.run(world.store.remove_expired())
    assert not folder.exists() and world.store.work(world.batch_id).exists()


class Killed(BaseException):
    """Stands for SIGKILL: no handler of errors sees it."""


@pytest.mark.parametrize("killer", ["b", "a line that is decoded"])
def test_a_batch_that_ended_its_server_twice_has_failed_and_is_not_tried_a_third_time(world, monkeypatch, killer):
    def kill(*_: object) -> None:
        raise Killed

    real_send = world.send

    def send(record: Record[Batch], request: BatchRequest) -> asyncio.Future[InProcessResponse]:
        answer = real_send(record, request)
        if request.custom_id == killer:
            kill()
        return answer

    world.send = send
    if killer != "b":
        monkeypatch.setattr(InputFile, "check", kill)
    for _ in range(2):
        with pytest.raises(Killed):
            world.work()
    num_sent = len(world.sent)
    world.work()
    batch = world.batch
    assert (batch.status, len(world.sent)) == ("failed", num_sent) and batch.errors is not None
    assert "ended twice while it worked on this batch" in batch.errors.data[0].message
    if killer == "b":  # what was answered stays
        assert batch.request_counts.completed == 1 and batch.request_counts.failed == 2
        assert batch.errors.data[0].line == 2 and batch.output_file_id is not None


def test_a_batch_goes_on_however_often_its_server_ends_as_long_as_it_gets_further(world):
    real_send = world.send

    killers = {"a", "b", "c"}

    def send(record: Record[Batch], request: BatchRequest) -> asyncio.Future[InProcessResponse]:
        if request.custom_id in killers:
            killers.remove(request.custom_id)
            raise Killed
        return real_send(record, request)

    world.send = send
    for _ in range(3):
        with pytest.raises(Killed):
            world.work()
    world.work()
    assert world.batch.status == "completed" and world.sent == ["a", "b", "c"]
