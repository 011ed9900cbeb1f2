"""Requests with an Idempotency-Key over HTTP: one answer, whoever asks, wherever, and however often."""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from msgspec import structs

from deployments.frontend.api_keys import hash_key
from deployments.http.middleware import AuthConfig
from deployments.jobs import lease as lease_module
from deployments.jobs.event_ids import NoEventIds
from deployments.jobs.job import Job
from deployments.jobs.record import JobRecord, job_id_of, record_key
from deployments.jobs.source import JobSource
from deployments.storage.config import StoreConfig, open_store
from deployments.storage.memory import MemoryStore
from engine.errors import InvalidParameter
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.token_delta import ErrorInfo, TokenDelta
from tests.deployments.fake_api import FakeApi, fake_api, says, tokenizer, until
from tests.deployments.jobs.test_event_ids import FRONTEND
from tests.redis_server import redis_server
from tests.scenarios import run
from tests.scrape import Scrape

KEY = {"Idempotency-Key": "key 1"}
PROMPT: dict[str, Any] = {"prompt": "abcdefgh", "max_tokens": 20}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
BODIES = {
    "completions": PROMPT,
    "chat/completions": CHAT,
    "messages": {**CHAT, "model": "fake"},
    "responses": {"input": "hello", "max_output_tokens": 20},
}
routes = pytest.mark.parametrize("route", BODIES)


@pytest.fixture(params=["sqlite", "redis"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreConfig]:
    if request.param == "sqlite":
        yield StoreConfig(url=f"sqlite://{tmp_path}/store.db")
        return
    with redis_server() as server:
        yield StoreConfig(url=server.url)


async def post(api: FakeApi, route: str, headers: dict[str, str] = KEY, **body: Any) -> httpx.Response:
    return await api.client.post(f"/v1/{route}", json=body, headers=headers)


def events_of(text: str) -> list[tuple[str, str]]:
    """(id, text) of each event."""
    found = []
    for event in text.split("\n\n")[:-1]:
        event_id, rest = event.split("\n", 1)
        assert event_id.startswith("id: ")
        found.append((event_id[4:], rest))
    return found


def text_of(events: list[tuple[str, str]]) -> str:
    """What a client shows of the events."""
    shown = ""
    for _, event in events:
        data = json.loads(event.rpartition("data: ")[2].replace("[DONE]", "{}"))
        match data:
            case {"choices": [{"text": text}]} | {"choices": [{"delta": {"content": text}}]}:
                shown += text or ""
            case {"type": "response.output_text.delta", "delta": text} | {"delta": {"text": text}}:
                shown += text
    return shown


@routes
async def test_a_second_request_with_the_key_gets_the_first_ones_answer_and_nothing_is_computed(route, api):
    answers = await asyncio.gather(*(post(api, route, **BODIES[route]) for _ in range(4)))
    answers.append(await post(api, route, **BODIES[route]))
    assert {answer.status_code for answer in answers} == {200}
    assert len({_without_times(answer) for answer in answers}) == 1
    assert len(api.engine.added) == 1
    other = await post(api, route, {"Idempotency-Key": "key 2"}, **BODIES[route])
    assert other.json()["id"] != answers[0].json()["id"] and len(api.engine.added) == 2


def _without_times(answer: httpx.Response) -> str:
    return json.dumps({**answer.json(), "completed_at": 0})


@routes
async def test_a_stream_can_be_gone_on_with_from_each_of_its_events(route):
    async with fake_api(says("Hello, world. ")) as api:
        body = {**BODIES[route], "stream": True}
        events = events_of((await post(api, route, **body)).text)
        stream_id = events[0][0].partition(":")[0]
        whole = text_of(events)
        assert len(whole) > 10
        for i, (event_id, _) in enumerate(events):
            last = {"Last-Event-ID": event_id}
            again = [
                await post(api, route, last, **body),
                await post(api, route, KEY | last, **body),
                await api.client.get(f"/v1/streams/{stream_id}", headers=last),
            ]
            assert len({text_of(events_of(answer.text)) for answer in again}) == 1 and again[0].status_code == 200
            rest = events_of(again[0].text)
            assert text_of(events[: i + 1]) + text_of(rest) == whole
            assert (events + rest)[-1][1][:25] == events[-1][1][:25]
        assert len(api.engine.added) == 1


@routes
async def test_a_position_that_its_stream_never_had_is_refused_and_not_tried_again(route):
    def forged(event_id: str) -> Iterator[str]:
        """Well-formed ids, of no event: other tokens, more of them, or an end where there is none."""
        stream_id, _, position = event_id.partition(":")
        number, choice, in_group, known = position.split(".")
        tokens, checksum = known[:-9].rstrip("-"), known[-9:].strip("-e")
        wrong = f"{int(checksum, 16) ^ 1:08x}"
        others = f"{tokens}-{wrong}", f"{tokens}-{wrong}e", f"9999-{checksum}", f"0-{wrong}", f"{known},{known}"
        for changed in others:
            yield f"{stream_id}:{number}.{choice}.{in_group}.{changed}"

    async with fake_api(says("Hello, world. ")) as api:
        body = {**BODIES[route], "stream": True}
        events = events_of((await post(api, route, **body)).text)
        inside = [event_id for event_id, _ in events if not event_id.endswith("e")]
        for last in (wrong for event_id in (inside[0], inside[-1]) for wrong in forged(event_id)):
            for answer in (
                await post(api, route, {"Last-Event-ID": last}, **body),
                await post(api, route, KEY | {"Last-Event-ID": last}, **body),
                await api.client.get(f"/v1/streams/{last[:32]}", headers={"Last-Event-ID": last}),
            ):
                assert answer.status_code in (400, 409), (last, answer.text)
                assert answer.status_code == 400 or answer.headers["X-Should-Retry"] == "false"
                assert "Last-Event-ID" in answer.json()["error"]["message"]
        assert len(api.engine.added) == 1


async def test_sequence_numbers_of_a_response_go_on_where_they_were():
    async with fake_api(says("Hello, world. ")) as api:
        body = {**BODIES["responses"], "stream": True}
        events = events_of((await post(api, "responses", **body)).text)
        for i, (event_id, _) in enumerate(events):
            rest = events_of((await post(api, "responses", {"Last-Event-ID": event_id}, **body)).text)
            numbers = [json.loads(e.rpartition("data: ")[2])["sequence_number"] for _, e in events[: i + 1] + rest]
            assert numbers == [*range(len(numbers))]


async def test_an_answer_is_computed_to_its_end_although_its_client_has_left(api):
    api.engine.paused.set()
    request = asyncio.create_task(post(api, "completions", **PROMPT))
    await until(lambda: api.engine.num_live)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    api.engine.paused.clear()
    answer = await post(api, "completions", **PROMPT)
    assert answer.json()["choices"][0]["text"] == ("abcdefgh" * 3)[:20]
    assert len(api.engine.added) == 1 and not api.engine.aborted


async def test_the_key_of_another_body_or_route_is_refused_by_name(api):
    await post(api, "completions", **PROMPT)
    stream = await post(api, "completions", {"Idempotency-Key": "2"}, **PROMPT, stream=True)
    last = {"Last-Event-ID": events_of(stream.text)[0][0]}
    for answer in (
        await post(api, "completions", **PROMPT, temperature=0),
        await post(api, "chat/completions", **CHAT),
        await post(api, "completions", last, **PROMPT),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (
            422, "idempotency_key_reused", "Idempotency-Key",
        )  # fmt: skip
    for headers in (
        KEY | last,
        {"Idempotency-Key": ""},
        {"Idempotency-Key": "x" * 256},
        {"Last-Event-ID": "1"},
    ):
        answer = await post(api, "completions", headers, **PROMPT, stream=True)
        assert answer.status_code == 400 and answer.json()["error"]["param"] in (*headers,), headers
    assert len(api.engine.added) == 2


async def test_a_refused_request_leaves_its_key_free(api):
    assert (await post(api, "completions", prompt="a" * 5000)).status_code == 400
    assert (await post(api, "completions", **PROMPT)).status_code == 200


async def test_an_engine_that_refuses_is_an_error_for_every_request_with_the_key_and_then_the_key_is_free(api):
    api.engine.refusal = ErrorInfo("engine_error", "no", 500, False, "internal_error")
    answers = await asyncio.gather(*(post(api, "completions", **PROMPT) for _ in range(3)))
    assert {answer.status_code for answer in answers} == {500}
    api.engine.refusal = None
    assert (await post(api, "completions", **PROMPT)).status_code == 200


async def test_each_api_key_has_answers_of_its_own():
    keys = tuple(f"{name}:{hash_key(name)}" for name in ("ann", "bob"))
    async with fake_api(auth=AuthConfig(api_keys=keys)) as api:
        ann, bob = ({**KEY, "Authorization": f"Bearer {name}"} for name in ("ann", "bob"))
        first = await post(api, "completions", ann, **PROMPT, stream=True)
        second = await post(api, "completions", bob, **PROMPT, stream=True)
        event_id = events_of(first.text)[0][0]
        assert event_id.partition(":")[0] != events_of(second.text)[0][0].partition(":")[0]
        stolen = await api.client.get(
            f"/v1/streams/{event_id.partition(':')[0]}", headers={**bob, "Last-Event-ID": event_id}
        )
        assert stolen.status_code == 404 and stolen.json()["error"]["code"] == "stream_not_found"


async def test_another_ingress_has_the_answer_of_one_that_has_ended(shared):
    async with fake_api(store=shared) as api:
        events = events_of((await post(api, "completions", **PROMPT, stream=True)).text)
        await until(lambda: not _live(api))
    async with fake_api(store=shared) as api:
        rest = events_of(
            (await api.client.get(f"/v1/streams/{events[0][0][:32]}", headers={"Last-Event-ID": events[4][0]})).text
        )
        assert text_of(events[:5]) + text_of(rest) == text_of(events)
        assert not api.engine.added


async def test_an_answer_that_an_ingress_left_is_computed_again_with_its_seed_and_goes_on_where_it_was(shared):
    def drawn(request: Any) -> list[int]:
        return tokenizer().encode("".join(chr(97 + (request.params.seed + i) % 26) for i in range(20)))[:20]

    async with fake_api(drawn, store=shared) as api:
        whole = events_of((await post(api, "completions", **PROMPT, stream=True)).text)
        await until(lambda: not _live(api))
    await change_record(shared, whole[0][0][:32], outputs=None)  # as if it had died before the end
    async with fake_api(drawn, store=shared) as api:
        rest = await post(api, "completions", KEY | {"Last-Event-ID": whole[6][0]}, **PROMPT, stream=True)
        assert events_of(rest.text) == whole[7:]
        assert len(api.engine.added) == 1


async def test_an_answer_that_was_begun_is_kept_if_the_next_ingress_fails_before_its_first_token(shared):
    """Seed 270 of tests.days: its client was told that it had another answer."""
    async with fake_api(store=shared) as api:
        whole = events_of((await post(api, "completions", **PROMPT, stream=True)).text)
        await until(lambda: not _live(api))
    await change_record(shared, whole[0][0][:32], outputs=None)  # as if it had died before the end
    async with fake_api(store=shared) as api:
        api.engine.refusal = ErrorInfo("engine_error", "no", 500, False, "internal_error")
        known = KEY | {"Last-Event-ID": whole[6][0]}
        failed = await post(api, "completions", known, **PROMPT, stream=True)
        assert failed.status_code == 500
        api.engine.refusal = None
        while (rest := await post(api, "completions", known, **PROMPT, stream=True)).status_code == 500:
            pass  # until the store knows that it has failed
        assert events_of(rest.text) == whole[7:]


async def test_an_answer_that_another_ingress_has_completed_stays_if_this_one_gets_the_lease_without_learning_of_it():
    """Seed 20528 of tests.days: the answer was computed again."""
    record = JobRecord("", "/", b"", [], 0, "0" * 32)
    complete = structs.replace(record, outputs=[TokenDelta(request_id="r", token_ids=[5], finish_reason="length")])

    class LosesAnswers(MemoryStore):
        async def add(self, key: str, value: bytes, ttl_s: float) -> bool:
            await self.set(record_key("id"), complete.encode(), ttl_s)
            await super().add(key, value, ttl_s)
            raise self.unavailable("its answer is lost")

    store, ended = LosesAnswers(1000), asyncio.Event()
    await store.set(record_key("id"), record.encode(), 60)
    job = Job("id", structs.replace(record), store, 60, lambda job: ended.set(), stored=True)
    request = GenerateRequest(request_id="r", prompt=[3], params=SamplingParams())
    await job.read(FRONTEND, [[request]], "", None, NoEventIds())
    await asyncio.wait_for(ended.wait(), 5)
    assert await JobRecord.load(store, "id") == complete


async def test_without_its_store_a_key_is_refused_and_what_was_begun_is_answered():
    with redis_server() as redis:
        async with fake_api(store=StoreConfig(url=redis.url)) as api:
            api.engine.paused.set()
            begun = asyncio.create_task(post(api, "completions", **PROMPT))
            await until(lambda: api.engine.num_live)
            redis.kill()
            api.engine.paused.clear()
            assert (await begun).json()["choices"][0]["finish_reason"] == "length"
            refused = await post(api, "completions", {"Idempotency-Key": "2"}, **PROMPT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
            assert "Retry-After" in refused.headers and len(api.engine.added) == 1
            metrics = Scrape((await api.client.get("/metrics")).text)
            assert metrics.sum("manta_store_errors_total", reason="unavailable") >= 1
            assert (await api.post("completions", **PROMPT)).status_code == 200


@contextmanager
def no_space(folder: Path) -> Iterator[Callable[[bool], None]]:
    """A disk that is full, or not; mounted for the test."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", folder], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")

    def fill(full: bool) -> None:
        with (folder / "filling").open("wb", buffering=0) as file, suppress(OSError):
            while full:
                file.write(b"x" * 512)

    try:
        yield fill
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def no_longer_files(folder: Path) -> Iterator[Callable[[bool], None]]:
    """Refuse growth as a quota does: no file may grow beyond the size that the store's have."""
    folder.mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(full: bool) -> None:
        size = max(file.stat().st_size for file in folder.iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]) if full else before)

    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limited", [no_space, no_longer_files])
def test_on_a_full_disk_a_key_is_refused_and_what_was_promised_is_answered_also_later(limited, tmp_path, caplog):
    async def scenario(folder: Path, fill: Callable[[bool], None]) -> None:
        async with fake_api(store=StoreConfig(url=f"sqlite://{folder}/store.db")) as api:
            api.engine.paused.set()
            begun = asyncio.create_task(post(api, "completions", **PROMPT))
            await until(lambda: api.engine.num_live)
            fill(True)
            refused = await post(api, "completions", {"Idempotency-Key": "2"}, **PROMPT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
            assert len(api.engine.added) == 1
            api.engine.paused.clear()
            whole = (await begun).json()
            assert len(whole["choices"][0]["text"]) == 20
            await until(lambda: "lease not released" in caplog.text)
            assert "store unavailable" in caplog.text and "job not stored" in caplog.text
            metrics = Scrape((await api.client.get("/metrics")).text)
            assert metrics.sum("manta_store_errors_total", reason="unavailable") >= 2
            fill(False)
            again = (await post(api, "completions", **PROMPT)).json()
            assert again == whole and len(api.engine.added) == 2
            assert (await post(api, "completions", {"Idempotency-Key": "2"}, **PROMPT)).status_code == 200

    with limited(tmp_path / "disk") as fill, mock.patch.object(lease_module, "LEASE_S", 0.5):
        run(scenario(tmp_path / "disk", fill))


async def test_an_answer_that_was_asked_for_again_ends_with_its_time_in_the_store_and_so_does_one_asked_for_in_vain(
    tmp_path,
):
    config = StoreConfig(url=f"sqlite://{tmp_path}/store.db")
    async with fake_api(store=config) as api:
        stream_id = events_of((await post(api, "completions", **PROMPT, stream=True)).text)[0][0][:32]
    async with fake_api(store=config) as api:
        assert (await post(api, "completions", **PROMPT, stream=True)).status_code == 200 and not api.engine.added
        await expire_record(config, stream_id)
        assert (await post(api, "completions", **PROMPT, stream=True)).status_code == 200
        assert len(api.engine.added) == 1
    await change_record(config, stream_id, outputs=None)
    async with fake_api(store=config) as api:
        assert (await post(api, "completions", **PROMPT, seed=1)).status_code == 422
        await expire_record(config, stream_id)
        assert (await post(api, "completions", **PROMPT, seed=1)).status_code == 200


async def test_a_request_that_is_refused_does_not_part_others_with_its_key_from_their_answer():
    reads, refused, read = list[JobSource](), asyncio.Event(), JobSource.start

    async def counted(self: JobSource, *args: Any) -> Any:
        reads.append(self)
        if len(reads) == 2:
            raise InvalidParameter("prompt", "a", "another one")
        if len(reads) == 1:
            await refused.wait()
        return await read(self, *args)

    async with fake_api() as api:
        api.engine.paused.set()
        with (
            mock.patch.object(JobSource, "start", counted),
            mock.patch.object(Job, "_take_over", side_effect=AssertionError("it is computed here")),
        ):
            first = asyncio.create_task(post(api, "completions", **PROMPT))
            await until(lambda: reads)
            assert (await post(api, "completions", **PROMPT)).status_code == 400
            refused.set()
            await until(lambda: api.engine.num_live)
            third = asyncio.create_task(post(api, "completions", **PROMPT))
            await until(lambda: len(reads) == 3)
            api.engine.paused.clear()
            assert (await first).status_code == 200 and (await third).text == (await first).text


async def test_a_background_response_that_is_cancelled_is_computed_no_further(api):
    api.engine.paused.set()
    started = await post(api, "responses", input="hello", background=True)
    await until(lambda: api.engine.num_live)
    cancelled = await api.client.post(f"/v1/responses/{started.json()['id']}/cancel")
    assert cancelled.json()["status"] == "cancelled"
    await until(lambda: not api.engine.num_live)


async def test_the_key_of_a_lease_is_no_stream(api):
    api.engine.paused.set()
    begun = asyncio.create_task(post(api, "completions", **PROMPT))
    await until(lambda: api.engine.num_live)
    stream_id = job_id_of("", KEY["Idempotency-Key"])
    for name in (f"{stream_id}:lease", f"-lease:{stream_id}"):
        answer = await api.client.get(f"/v1/streams/{name}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "stream_not_found")
    api.engine.paused.clear()
    assert (await begun).status_code == 200


async def expire_record(config: StoreConfig, stream_id: str) -> None:
    store = open_store(config)
    await store.delete(record_key(stream_id))
    await store.close()


async def change_record(config: StoreConfig, stream_id: str, value: bytes | None = None, **fields: Any) -> None:
    """Leave a record as a crash, or a broken disk, would have left it."""
    store = open_store(config)
    record = await JobRecord.load(store, stream_id)
    assert record is not None
    for name, changed in fields.items():
        setattr(record, name, changed)
    await store.set(record_key(stream_id), record.encode() if value is None else value, 60)
    await store.close()


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
async def test_a_complete_answer_keeps_the_fingerprint_of_the_version_that_gave_it(tmp_path, route):
    config = StoreConfig(url=f"sqlite://{tmp_path}/store.db")
    async with fake_api(says("ok so"), store=config, fingerprint="fp_old") as api:
        given = (await post(api, route, **BODIES[route])).json()
    assert given["system_fingerprint"] == "fp_old"
    async with fake_api(store=config, fingerprint="fp_new") as api:
        assert (await post(api, route, **BODIES[route])).json() == given
        assert not api.engine.added


async def test_a_stored_answer_that_cannot_be_read_or_gone_on_with_is_an_error_by_name(tmp_path):
    config = StoreConfig(url=f"sqlite://{tmp_path}/store.db")
    async with fake_api(store=config) as api:
        events = events_of((await post(api, "completions", **PROMPT, stream=True)).text)
    stream_id, last = events[0][0][:32], {"Last-Event-ID": events[5][0]}
    await change_record(config, stream_id, outputs=None)
    async with fake_api(store=config, fingerprint="fp_other") as api:
        answer = await post(api, "completions", **PROMPT, stream=True)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "answer_not_reproducible")
        assert "fp_other" in answer.text and not api.engine.added
    async with fake_api(says("something else, of other weights"), store=config) as api:
        answer = await post(api, "completions", last, **PROMPT, stream=True)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "answer_diverged")
    await change_record(config, stream_id, b"no record")
    async with fake_api(store=config) as api:
        answer = await post(api, "completions", **PROMPT, stream=True)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "stored_value_corrupt")
        metrics = Scrape((await api.client.get("/metrics")).text)
        assert metrics.sum("manta_store_errors_total", reason="corrupt") == 1


def _live(api: FakeApi) -> int:
    return api.engine.num_live
