from __future__ import annotations

import shutil
from concurrent.futures import Future
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from deployments.http.in_process import InProcessResponse
from deployments.openai.batches.files import MAX_AGE_S
from deployments.openai.batches.input_file import BatchRequest
from deployments.openai.batches.objects import Batch, BatchBody
from deployments.openai.batches.output_file import OutputLine
from deployments.openai.batches.records import Record
from deployments.openai.batches.run import BatchRun, Stopped
from deployments.openai.batches.store import INPUT, BatchStore
from tests.deployments.openai.batches.batches import jsonl, line

FULL, ROOMY = SimpleNamespace(free=0), SimpleNamespace(free=2**40)


class World:
    """A batch of three lines. `answers` are given to them; those without one stay in flight."""

    def __init__(self, folder: Path):
        self.store = BatchStore(folder)
        file = self.store.files.upload(BytesIO(jsonl(*map(line, "abc"))), None, "in.jsonl", MAX_AGE_S)
        body = BatchBody(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        self.batch_id = self.store.create(body, None, ()).id
        self.answers = {"a": 200, "b": 200, "c": 200}
        self.stopping = False
        self.sent: list[str] = []
        self.in_flight: list[Future[InProcessResponse]] = []

    def send(self, _: Record[Batch], request: BatchRequest) -> Future[InProcessResponse]:
        future: Future[InProcessResponse] = Future()
        self.sent.append(request.custom_id)
        self.in_flight.append(future)
        if request.custom_id in self.answers:
            future.set_result(InProcessResponse(self.answers[request.custom_id], body=b"{}"))
        else:
            self.stopping = True
        return future

    def work(self) -> None:
        with self.store.claim(self.batch_id) as record:
            assert record is not None
            BatchRun(self.store, record, (), self.send, lambda _: 1, lambda: self.stopping).run()

    @property
    def batch(self) -> Batch:
        return self.store.get(self.batch_id, None)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_server_that_stops_gives_up_what_is_in_flight_and_the_next_one_sends_only_that(world):
    del world.answers["b"]
    with pytest.raises(Stopped):
        world.work()
    assert world.in_flight[-1].cancelled()
    world.stopping, world.answers["b"] = False, 200
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
    _, path = world.store.files.content(world.batch.error_file_id, None)
    answer = msgspec.json.decode(path.read_bytes(), type=OutputLine)
    assert answer.error is not None
    assert (answer.custom_id, answer.response, answer.error.code) == ("b", None, "request_timeout")


def test_only_one_of_several_servers_works_on_a_batch(world, tmp_path):
    other = BatchStore(tmp_path)
    with world.store.claim(world.batch_id) as record, other.claim(world.batch_id) as second:
        assert record is not None and second is None
    with other.claim(world.batch_id) as record:
        assert record is not None


def test_what_was_left_while_a_batch_was_created_is_removed_after_a_day(world):
    folder = world.store.work(f"batch_{0:032x}")
    folder.mkdir()
    world.store.remove_expired()
    assert not folder.exists() and world.store.unfinished() == [world.batch_id]
