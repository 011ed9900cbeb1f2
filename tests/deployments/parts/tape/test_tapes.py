"""Kept tapes and the present one on the console: any moment of a real engine's tape, replayed by another process."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
import pytest

from cluster.lab.tape.viewer_process import TapeAnswer
from deployments.frontend.api_keys import hash_key
from deployments.http.middleware import AuthConfig
from deployments.parts.tape import tape_viewer
from deployments.parts.tape.questions import PoolTapes, TakeTapes
from engine.costs.step_cost import StepTimes
from engine.parts.tape.file import TapeFile, read_file
from engine.parts.tape.object_graph import GraphWriter
from engine.parts.tape.ring import EngineTape, Segment, hashes_entry
from engine.parts.tape.snapshot import KINDS
from tests.cluster.lab.recorded.taped_engine import record, with_a_choice
from tests.deployments.fake_api import FakeApi, fake_api
from tests.deployments.parts.tape.fake_tapes import FakeTapes

HASH = b"hash of a prompt"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return record(tmp_path_factory.mktemp("tapes"), "engine-1")


async def look(api: FakeApi, name: str, **question: Any) -> TapeAnswer:
    response = await api.client.get(f"/console/tapes/{name}", params=question)
    assert response.status_code == 200, response.text
    return msgspec.json.decode(response.content, type=TapeAnswer)


async def test_a_kept_tape_is_found_and_shows_queue_blocks_and_batch_at_any_moment(file, api):
    FakeTapes(api, file)
    listed = (await api.client.get("/console/tapes")).json()["tapes"]
    assert listed == [{"name": file.name, "size": file.stat().st_size, "written_at": 0.0}]
    start = await look(api, file.name)
    assert (start.engines, start.engine, start.choices) == (["engine-1"], "engine-1", [])
    assert start.moment is not None and start.moment.what == "the start of the tape"
    later = (await look(api, file.name, position=20)).moment
    assert later is not None and later.position == 20 and later.moments == start.moment.moments
    assert len(later.requests["running"]) == len(later.batch) == 3 and later.requests["waiting"]
    assert 0 < later.blocks[0].used < later.blocks[0].total == 40
    at = (await look(api, file.name, seconds=later.seconds)).moment
    assert at is not None and at.position >= 20
    end = (await look(api, file.name, position=10**9)).moment
    assert end is not None and end.position == end.moments and not end.requests


async def test_what_engines_have_now_is_taken_when_its_name_is_new(file, api):
    taken = PoolTapes(read_file(file).engines, [])

    async def ask(question: TakeTapes, kind: type[PoolTapes], timeout_s: float) -> list[PoolTapes]:
        nonlocal times
        times += 1
        return [taken]

    times, api.pool.ask = 0, ask
    for name in ("now-1", "now-1", "now-2"):
        assert (await look(api, name, position=5)).moment.position == 5
    assert times == 2


async def test_choices_of_routers_are_shown_by_the_names_of_their_fields(file, api):
    FakeTapes(api, routed := with_a_choice(file))
    (view,) = (await look(api, routed.name, position=10**9)).choices
    assert (view.router, view.pool, view.choice["ranked"]) == ("ingress-1", "decode", ["engine-1"])
    assert view.choice["known"]["engine-1"]["slots"] == 4


async def test_without_a_tape_the_answer_says_why(api):
    answer = await look(api, "now-1")
    assert (answer.engines, answer.moment) == ([], None) and "engine.tape_mib" in answer.problem


async def test_only_admins_see_tapes_and_an_unknown_one_is_not_found(file):
    auth = AuthConfig(api_keys=tuple(f"{name}:{hash_key(name)}" for name in ("boss", "user")), admin_keys=("boss",))
    async with fake_api(auth=auth) as api:
        for path in ("/console/tapes", f"/console/tapes/{file.name}"):
            response = await api.client.get(path, headers={"Authorization": "Bearer user"})
            assert response.status_code == 403
        response = await api.client.get("/console/tapes/..%2Fsecret", headers={"Authorization": "Bearer boss"})
        assert response.status_code == 404
        response = await api.client.get("/console/tapes/none.tape", headers={"Authorization": "Bearer boss"})
        assert response.status_code == 404 and "none.tape" in response.json()["error"]["message"]


async def test_a_replay_that_takes_too_long_ends_and_the_next_question_begins_anew(file, monkeypatch, api):
    FakeTapes(api, file)
    monkeypatch.setattr(tape_viewer, "ANSWER_S", 0.0)
    response = await api.client.get(f"/console/tapes/{file.name}")
    assert response.status_code == 503 and "takes more than" in response.json()["error"]["message"]
    monkeypatch.undo()
    assert (await look(api, file.name, position=3)).moment.position == 3


async def test_a_disk_that_is_full_is_said_and_leaves_no_file(file, api, tmp_path, monkeypatch):
    FakeTapes(api, file)
    monkeypatch.setattr(tape_viewer.tempfile, "tempdir", str(tmp_path / "missing"))
    response = await api.client.get(f"/console/tapes/{file.name}")
    assert response.status_code == 503 and "the tape cannot be opened" in response.text
    monkeypatch.setattr(tape_viewer.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tape_viewer.sys, "executable", str(tmp_path / "missing"))
    response = await api.client.get(f"/console/tapes/{file.name}")
    assert response.status_code == 503 and not list(tmp_path.iterdir())


async def test_the_tape_is_fetched_by_admins_only_and_its_hashes_have_a_key():
    auth = AuthConfig(api_keys=tuple(f"{name}:{hash_key(name)}" for name in ("boss", "user")), admin_keys=("boss",))
    async with fake_api(auth=auth) as api:
        await api.until_status()
        segment = Segment(0.0, GraphWriter(KINDS, {}, {}).write(StepTimes()), hashes_entry(1, [HASH]), b"")
        tape = EngineTape(engine_id="e", version="v", wall_s=0.0, role="", segments=[segment])
        FakeTapes(api, tape=msgspec.msgpack.encode(tape))
        for key, status in (("user", 403), ("boss", 200)):
            response = await api.client.get("/debug/tape", headers={"authorization": f"Bearer {key}"})
            assert response.status_code == status
        (keyed,) = msgspec.msgpack.decode(zlib.decompress(response.content), type=TapeFile).engines
        found = msgspec.msgpack.decode(keyed, type=EngineTape)
        assert found.engine_id == "e" and HASH not in keyed
        assert len(found.segments[0].entries) == len(hashes_entry(1, [HASH]))
