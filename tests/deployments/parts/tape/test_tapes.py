"""Kept tapes and the present one, over HTTP."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deployments.frontend.api_keys import hash_key
from deployments.http.middleware import AuthConfig
from deployments.parts.tape.left_tapes import LeftTapes
from deployments.parts.tape.questions import ListKeptTapes
from deployments.replicas.pools import ReplicaQuestion
from deployments.replicas.replica_part import ReplicaPart
from engine.config import EngineConfig
from engine.costs.step_cost import StepTimes
from engine.parts.tape.engine_tape import EngineTape, Segment
from engine.parts.tape.file import TapeFile
from engine.parts.tape.kept_tapes import KeptTapes
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
        size = file.stat().st_size
        assert listed.json()["tapes"] == [{"name": file.name, "size": size, "written_at": 0.0, "own": False}]
        assert read.content == file.read_bytes()
        assert outside.status_code == 404
        assert unknown.status_code == 404 and "none.tape" in unknown.json()["error"]["message"]


class Listing(ReplicaPart):
    """A replica that lists what is kept on its machine."""

    def __init__(self, folder: Path, *engine_ids: str):
        self._left = LeftTapes(EngineConfig(model="m", tape_dir=str(folder)), engine_ids)

    async def answer(self, question: ReplicaQuestion) -> Any:
        return await self._left.files() if isinstance(question, ListKeptTapes) else None


async def test_tapes_of_a_servers_own_deployments_come_first_and_those_of_others_are_told_apart(tmp_path):
    kept, names = KeptTapes(tmp_path, 8), dict[str, str]()
    engines = ("decode-m-dead", "decode-other-b1", "prefill-m-c1.dp1", "pocket", "decode-m-dead", "decode-org/m-x")
    for number, engine in enumerate(engines):
        head = EngineTape(engine_id=engine, version="v", wall_s=0.0, role="", segments=[], cause="ended")
        file = kept.keep(head)
        os.utime(file, (number, number))
        names[file.name] = f"{engine} {number}"
    async with fake_api() as api:
        api.pool.parts += [
            Listing(tmp_path, "decode-m-a1"),
            Listing(tmp_path, "decode-org/m-a1"),
            Listing(tmp_path, "prefill-m-c2.dp0", "prefill-m-c2.dp1"),
        ]
        listed = (await api.client.get("/debug/tapes")).json()["tapes"]
    own = [names[tape["name"]] for tape in listed if tape["own"]]
    assert own == ["decode-org/m-x 5", "decode-m-dead 4", "prefill-m-c1.dp1 2", "decode-m-dead 0"]
    assert [names[tape["name"]] for tape in listed] == [*own, "pocket 3", "decode-other-b1 1"]


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
