from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deployments.errors import PoisonRequest
from deployments.frontend.sequence import ReportedError
from deployments.parts.adapters import registry as registry_module
from deployments.parts.adapters.errors import AdapterAlreadyLoaded
from deployments.parts.adapters.files import open_served
from deployments.parts.adapters.registry import AdapterRegistry
from deployments.parts.adapters.sources import AdapterSources
from deployments.parts.adapters.table import MemoryTable
from deployments.poison.poison import Poison
from deployments.replicas.engine_replica import EngineReplica
from deployments.served_adapter import ServedAdapter
from engine.black_box import ended_key, read_key
from engine.errors import EngineUnavailable, InvalidParameter
from engine.lora.errors import AdapterError, AdapterNotFound
from engine.lora.messages import AdapterLoaded, LoadAdapter
from engine.wire.parts.adapter import ModelAdapter
from engine.wire.token_delta import ErrorInfo
from tests.adapter_folders import write_adapter


class Pool:
    """Replicas that say of every adapter what `error` is."""

    def __init__(self) -> None:
        self.loaded: list[ModelAdapter] = []
        self.error: ErrorInfo | None = None
        self.sleeps = False

    async def asleep(self) -> bool:
        return self.sleeps

    async def ask_one(self, question: LoadAdapter, kind: type[AdapterLoaded], adapter: str) -> list[AdapterLoaded]:
        self.loaded.append(question.lora)
        await asyncio.sleep(0)
        return [AdapterLoaded(), AdapterLoaded(self.error)]


class DyingPool(Pool):
    """Replicas of which each is asked for one load. The engines of the first ones die before they have answered."""

    def __init__(self, deaths: int):
        super().__init__()
        self.replicas = [EngineReplica("127.0.0.1") for _ in range(deaths)]

    async def ask_one(self, question: LoadAdapter, kind: type[AdapterLoaded], adapter: str) -> list[AdapterLoaded]:
        if not self.replicas:
            return await super().ask_one(question, kind, adapter)
        replica = self.replicas.pop(0)
        replica.connect("tcp://127.0.0.1:9")
        running = asyncio.create_task(replica.run())
        asyncio.get_running_loop().call_soon(replica.fail, "rank 0 died")
        try:
            return [msgspec.msgpack.decode(await replica.ask(question), type=kind)]
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def make(table: MemoryTable | None = None, pool: Pool | None = None, **config: Any) -> AdapterRegistry:
    given = AdapterSources(**{"max_rank": 16, **config})
    return AdapterRegistry("base", ("base", "alias"), given, table or MemoryTable(), pool or Pool(), Poison())  # type: ignore[arg-type]


def configured(folder: Path) -> ServedAdapter:
    return open_served("own", str(write_adapter(folder / "own")), "base", 16)


async def test_an_adapter_is_found_by_its_name_alone_and_behind_that_of_its_model(tmp_path):
    own = configured(tmp_path)
    registry = make(modules=(own,))
    for name in ("own", "base:own", "alias:own"):
        assert await registry.find(name) is own and name in registry
    for name in ("other", "other:own", "base:", "base", ""):
        assert await registry.find(name) is None and name not in registry


async def test_what_one_ingress_loads_and_unloads_the_others_see(tmp_path):
    table, own = MemoryTable(), configured(tmp_path)
    one, other = (make(table, modules=(own,)) for _ in range(2))
    path = str(write_adapter(tmp_path / "sql", seed=1))
    assert await other.find("sql") is None
    await one.load("sql", path, in_place=False)
    table.num_heard += 1
    assert await one.find("sql") == await other.find("sql") is not None
    assert await one.unload("sql") and await one.unload("own")
    table.num_heard += 1
    for name in ("sql", "own"):
        assert await one.find(name) is None and await other.find(name) is None
    late = make(table, modules=(own,))  # an ingress that has just started
    assert await late.find("own") is None
    await late.load("own", own.path, in_place=False)
    table.num_heard += 1
    assert [name for name, _ in await one.listed()] == ["own"]


async def test_a_change_that_nobody_tells_of_is_seen_soon(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(registry_module.time, "monotonic", lambda: now[0])
    table = MemoryTable()
    one, other = make(table), make(table)
    assert await other.find("sql") is None
    await one.load("sql", str(write_adapter(tmp_path / "sql")), in_place=False)
    now[0] += 2 * registry_module.READ_AGAIN_S
    assert await other.find("sql") is not None
    await one.unload("sql")
    now[0] += 2 * registry_module.READ_S
    assert await other.find("sql") is None


async def test_a_table_that_cannot_be_reached_changes_nothing(tmp_path):
    table, own = MemoryTable(), configured(tmp_path)
    registry = make(table, modules=(own,))

    async def away() -> Any:
        raise EngineUnavailable("away")

    table.changes = away  # type: ignore[method-assign]
    assert await registry.find("own") is own
    assert await registry.find("sql") is None


async def test_a_name_that_is_taken_is_loaded_in_place_only(tmp_path):
    pool = Pool()
    registry = make(pool=pool)
    await registry.load("sql", str(write_adapter(tmp_path / "1")), in_place=False)
    first = await registry.find("sql")
    with pytest.raises(AdapterAlreadyLoaded, match="'sql' has already been loaded"):
        await registry.load("sql", str(write_adapter(tmp_path / "2", seed=1)), in_place=False)
    assert await registry.find("sql") is first
    await registry.load("sql", str(tmp_path / "2"), in_place=True)
    second = await registry.find("sql")
    assert first is not None and second is not None and first.digest != second.digest
    assert [lora.digest for lora in pool.loaded] == [first.digest, second.digest]


async def test_of_two_loads_of_one_name_at_once_one_wins(tmp_path):
    path, table = str(write_adapter(tmp_path / "sql")), MemoryTable()
    for one, other in ((make(table),) * 2, (make(table), make(table))):  # in one ingress, and in two
        calls = (ingress.load("sql", path, in_place=False) for ingress in (one, other))
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert sorted(map(repr, map(type, results))) == sorted(map(repr, (type(None), AdapterAlreadyLoaded)))
        assert await one.unload("sql")


async def test_what_an_engine_cannot_use_is_not_served(tmp_path):
    pool, path = Pool(), str(write_adapter(tmp_path / "sql"))
    pool.error = ErrorInfo(
        code="adapter_error", message="no such layer", type="invalid_request_error", status=400, retryable=False
    )
    registry = make(pool=pool)
    with pytest.raises(ReportedError, match="no such layer"):
        await registry.load("sql", path, in_place=False)
    assert len(pool.loaded) == 1, "another engine was asked for what none can use"
    assert await registry.find("sql") is None
    pool.sleeps = True  # there is no engine to ask: requests for it will get the error
    await registry.load("sql", path, in_place=False)
    assert await registry.find("sql") is not None


@pytest.mark.parametrize("deaths", [1, 2, 3])
async def test_a_load_whose_engine_dies_is_asked_of_another_one(tmp_path, monkeypatch, deaths):
    monkeypatch.setattr(registry_module, "BACK_OFF_S", 0.0)
    pool, path = DyingPool(deaths), str(write_adapter(tmp_path / "sql"))
    registry = make(pool=pool)
    if deaths < registry_module.LOAD_ATTEMPTS:
        await registry.load("sql", path, in_place=False)
        found = await registry.find("sql")
        assert found is not None and pool.loaded == [found.record]
    else:
        with pytest.raises(EngineUnavailable, match="rank 0 died"):
            await registry.load("sql", path, in_place=False)
        assert await registry.find("sql") is None
    assert not pool.replicas


async def test_a_load_that_no_engine_answers_has_a_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(registry_module, "LOAD_TIMEOUT_S", 0.01)
    pool = Pool()
    pool.ask_one = lambda *_: asyncio.Event().wait()  # type: ignore[method-assign, assignment, return-value]
    registry = make(pool=pool)
    with pytest.raises(EngineUnavailable, match=r"within 0\.01 s"):
        await registry.load("sql", str(write_adapter(tmp_path / "sql")), in_place=False)
    assert await registry.find("sql") is None


async def test_files_are_looked_at_before_an_engine_is_asked(tmp_path):
    pool = Pool()
    registry = make(pool=pool, max_rank=4)
    with pytest.raises(AdapterNotFound):
        await registry.load("sql", str(tmp_path / "none"), in_place=False)
    with pytest.raises(AdapterError, match="rank"):
        await registry.load("sql", str(write_adapter(tmp_path / "sql", rank=8)), in_place=False)
    for name in ("base", "alias", "a\nb"):
        with pytest.raises(InvalidParameter, match="lora_name"):
            await registry.load(name, str(tmp_path), in_place=False)
    assert not pool.loaded and not await registry.unload("sql")


class EndingPool(Pool):
    """Engines of which each ends while it reads an adapter. by_itself: else something else has killed it."""

    def __init__(self, by_itself: bool):
        super().__init__()
        self.by_itself = by_itself

    async def ask_one(self, question: LoadAdapter, kind: type[AdapterLoaded], adapter: str) -> list[AdapterLoaded]:
        self.loaded.append(question.lora)
        doing = [ended_key(str(len(self.loaded))), read_key(adapter)]
        raise EngineUnavailable("rank 0 died", doing if self.by_itself else [])


@pytest.mark.parametrize(("by_itself", "asked", "error"), [(True, 2, PoisonRequest), (False, 3, EngineUnavailable)])
async def test_an_adapter_with_which_two_engines_end_is_read_by_no_third(
    tmp_path, monkeypatch, by_itself, asked, error
):
    monkeypatch.setattr(registry_module, "BACK_OFF_S", 0.0)
    pool, folder = EndingPool(by_itself), str(write_adapter(tmp_path / "sql"))
    adapters = make(pool=pool)
    with pytest.raises(error):
        await adapters.load("sql", folder, in_place=False)
    assert len(pool.loaded) == asked and "sql" not in adapters
    with pytest.raises(error):
        await adapters.load("again", folder, in_place=False)
    assert len(pool.loaded) == asked + (0 if by_itself else 3), "it is refused at once"
