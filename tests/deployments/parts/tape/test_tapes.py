"""Kept tapes and the present one, over HTTP."""

from __future__ import annotations

import zlib

import msgspec
import pytest

from deployments.frontend.api_keys import hash_key
from deployments.http.middleware import AuthConfig
from engine.costs.step_cost import StepTimes
from engine.parts.tape.engine_tape import EngineTape, Segment
from engine.parts.tape.file import TapeFile
from engine.parts.tape.object_graph import GraphWriter
from engine.parts.tape.ring import hashes_entry
from engine.parts.tape.snapshot import KINDS
from tests.cluster.lab.recorded.taped_engine import record
from tests.deployments.fake_api import fake_api
from tests.deployments.parts.tape.fake_tapes import FakeTapes

HASH = b"hash of a prompt"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return record(tmp_path_factory.mktemp("tapes"), "engine-1")


async def test_a_kept_tape_is_listed_and_read_by_admins_only_and_an_unknown_one_is_not_found(file):
    auth = AuthConfig(api_keys=tuple(f"{name}:{hash_key(name)}" for name in ("boss", "user")), admin_keys=("boss",))
    async with fake_api(auth=auth) as api:
        FakeTapes(api, file)
        paths = ("/debug/tapes", f"/debug/tapes/{file.name}", "/debug/tapes/..%2Fsecret", "/debug/tapes/none.tape")
        for path in paths:
            assert (await api.client.get(path, headers={"Authorization": "Bearer user"})).status_code in (403, 404)
        listed, read, outside, unknown = [
            await api.client.get(path, headers={"Authorization": "Bearer boss"}) for path in paths
        ]
        assert listed.json()["tapes"] == [{"name": file.name, "size": file.stat().st_size, "written_at": 0.0}]
        assert read.content == file.read_bytes()
        assert outside.status_code == 404
        assert unknown.status_code == 404 and "none.tape" in unknown.json()["error"]["message"]


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
