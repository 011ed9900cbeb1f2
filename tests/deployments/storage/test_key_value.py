"""Stores of values: what all of them do, and the limits of each. The Redis is a real one."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config.app_config import AppConfig
from deployments.jobs import lease
from deployments.jobs.lease import Lease
from deployments.parts.keys import managed_keys
from deployments.quotas import key_quota
from deployments.storage import config as config_module
from deployments.storage import redis as redis_module
from deployments.storage import sqlite as sqlite_module
from deployments.storage.config import StoreConfig, open_store
from deployments.storage.key_value import KeyValueStore, StoredValueCorrupt, StoreUnavailable, sealed
from deployments.storage.memory import MemoryStore
from deployments.storage.redis import RedisStore
from deployments.storage.sqlite import SqliteStore
from engine.errors import ConfigError
from tests.redis_server import RedisServer, redis_server


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may be busy."""
    monkeypatch.setattr(sqlite_module, "TIMEOUT_S", 30.0)


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(params=["memory", "sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str | None]:
    match request.param:
        case "memory":
            yield None
        case "sqlite":
            yield f"sqlite://{tmp_path}/folder/store.db"
        case _:
            with redis_server() as server:
                yield server.url


@asynccontextmanager
async def opened(url: str | None, max_bytes: int = 2**20) -> AsyncGenerator[KeyValueStore]:
    store = open_store(StoreConfig(url=url, max_bytes=max_bytes))
    try:
        yield store
    finally:
        await store.close()


async def test_a_value_is_added_once_and_only_whoever_knows_it_replaces_it(url):
    async with opened(url) as store:
        added = await asyncio.gather(*(store.add("lease", bytes([i]), 60) for i in range(20)))
        assert sum(added) == 1
        holder = bytes([added.index(True)])
        assert await store.replace("lease", holder, b"next", 60)
        assert not await store.replace("lease", holder, b"another", 60)
        assert await store.get("lease") == b"next"
        await store.delete("lease")
        assert not await store.replace("lease", b"next", holder, 60)
        assert await store.get("lease") is None


async def test_a_replaced_value_lives_longer_and_one_that_has_expired_is_free(url):
    async with opened(url) as store:
        async with asyncio.timeout(60):
            while not await store.replace("a", b"1", b"1", 60):
                await store.set("a", b"1", 0.2)
            await store.set("b", b"2", 0.2)
            while not await store.add("b", b"3", 60):
                await asyncio.sleep(0.01)
        assert (await store.get("a"), await store.get("b")) == (b"1", b"3")


async def test_what_a_file_was_given_is_there_when_it_is_opened_again(tmp_path):
    async with opened(f"sqlite://{tmp_path}/a.db") as store, opened(f"sqlite://{tmp_path}/a.db") as other:
        await asyncio.gather(*(store.set(str(i), b"x" * i, 60) for i in range(100)))
        assert await other.get("42") == b"x" * 42
        files = sorted(tmp_path.iterdir())
        assert [file.name for file in files] == ["a.db", "a.db-shm", "a.db-wal"]
        assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    async with opened(f"sqlite://{tmp_path}/a.db") as store:
        assert await store.get("99") == b"x" * 99


@pytest.mark.parametrize("ttl_s", [key_quota.TTL_S, managed_keys.TTL_S])
async def test_counters_and_keys_outlive_a_clock_that_is_a_year_ahead_for_a_while(tmp_path, monkeypatch, ttl_s):
    clock = SimpleNamespace(time=time.time, monotonic=time.monotonic)
    monkeypatch.setattr(sqlite_module, "time", clock)
    monkeypatch.setattr(sqlite_module, "CLEAN_UP_S", 0.0)
    async with opened(f"sqlite://{tmp_path}/a.db") as store:
        await store.set("kept", b"1", ttl_s)
        await store.set("other", b"2", 86400.0)
        for off_s in (0.0, 365 * 86400.0, 0.0):
            clock.time = lambda off_s=off_s: time.time() + off_s
            assert await store.get("kept") == b"1"
        assert await store.get("other") is None, "what expires is removed at once"


async def test_a_full_file_refuses_a_value_and_keeps_the_others_and_takes_one_again_when_they_have_expired(tmp_path):
    async with opened(f"sqlite://{tmp_path}/a.db", max_bytes=2**17) as store:
        for i in range(3):
            await store.set(str(i), bytes([i]) * 30_000, 60)
        large = store.set("large", b"x" * 100_000, 60)
        small = store.set("small", b"y", 60)
        refused, taken = await asyncio.gather(large, small, return_exceptions=True)
        assert isinstance(refused, StoreUnavailable) and "full" in str(refused) and taken is None
        assert [await store.get(str(i)) for i in range(3)] == [bytes([i]) * 30_000 for i in range(3)]
        for i in range(3):
            await store.delete(str(i))
        await store.set("large", b"x" * 60_000, 60)


async def test_a_file_that_another_process_holds_is_waited_for_once_by_all_calls(tmp_path, monkeypatch):
    waits = []

    class Held(sqlite3.Connection):
        def execute(self, statement: str, *args: Any) -> sqlite3.Cursor:
            if statement == "begin immediate":
                waits.append(statement)
                raise sqlite3.OperationalError("database is locked")
            return super().execute(statement, *args)

    monkeypatch.setattr(sqlite_module.sqlite3, "connect", partial(sqlite3.connect, factory=Held))
    async with opened(f"sqlite://{tmp_path}/a.db") as store:
        results = await asyncio.gather(*(store.get(str(i)) for i in range(100)), return_exceptions=True)
        assert {type(result) for result in results} == {StoreUnavailable} and len(waits) <= 2


async def test_a_disk_that_does_not_answer_is_waited_for_no_longer_than_its_deadline(tmp_path, monkeypatch):
    answers = threading.Event()
    async with opened(f"sqlite://{tmp_path}/a.db") as store:
        assert isinstance(store, SqliteStore)
        monkeypatch.setattr(sqlite_module, "TIMEOUT_S", 0.02)
        with pytest.raises(StoreUnavailable, match="did not answer within"):
            await store._run(lambda database: answers.wait(60))
        answers.set()


async def test_a_store_that_is_closed_says_so_to_whoever_comes_late(tmp_path):
    async with opened(f"sqlite://{tmp_path}/a.db") as store:
        pass
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.get("a")


async def test_a_file_that_is_no_database_is_refused_at_the_start_and_one_that_breaks_is_said(tmp_path):
    (tmp_path / "a.db").write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match="a writable SQLite file"):
        open_store(StoreConfig(url=f"sqlite://{tmp_path}/a.db"))
    async with opened(f"sqlite://{tmp_path}/b.db") as store:
        await store.set("a", b"1", 60)
        with sqlite3.connect(tmp_path / "b.db") as database:
            database.execute("drop table stored")
        with pytest.raises(StoreUnavailable, match="no such table"):
            await store.get("a")


async def test_a_redis_that_does_not_answer_is_waited_for_no_longer_than_its_deadline(redis, monkeypatch):
    store = RedisStore(redis.url)
    await store.set("a", b"1", 60)
    redis.process.send_signal(signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(redis_module, "TIMEOUT_S", 0.05)
            with pytest.raises(StoreUnavailable, match="TimeoutError"):
                await store.get("a")
    finally:
        redis.process.send_signal(signal.SIGCONT)
    assert await store.get("a") == b"1"


async def test_no_lease_is_taken_before_its_holder_has_stored_it_again_in_a_redis_that_restarted_while_nobody_asked(
    redis, monkeypatch
):
    monkeypatch.setattr(lease, "RENEW_S", 0.05)
    monkeypatch.setattr(redis_module, "SETTLE_S", 1.0)
    holder, idle = Lease(RedisStore(redis.url), "job"), RedisStore(redis.url)
    assert await holder.take(await idle.settled())
    async with holder.kept():
        redis.kill()
        redis.start()
        assert not await Lease(idle, "job").take(await idle.settled())


@pytest.mark.parametrize(
    "content", [b"", b"\xc1", b"\xa1\xff", b"\x92\x01\x02"], ids=["empty", "no type", "no UTF-8", "list"]
)
def test_a_value_that_another_version_has_written_is_told_from_one_that_is_missing(content):
    """Text that is no UTF-8 was an internal error."""
    store = MemoryStore(2**20)
    with pytest.raises(StoredValueCorrupt, match="the stored value a key cannot be read"):
        store.unsealed("a key", sealed(content), msgspec.msgpack.Decoder(str).decode)
    assert store.errors["corrupt"] == 1


async def test_redis_forgets_a_response_after_its_time(redis):
    store = RedisStore(redis.url)
    await store.set("a", b"1", 0.001)
    async with asyncio.timeout(60):
        while await store.get("a") is not None:
            await asyncio.sleep(0.001)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 12)), max_size=40))
def test_memory_holds_the_newest_values_that_fit(puts):
    async def scenario() -> None:
        store, newest = MemoryStore(max_bytes=20), list[tuple[str, int]]()
        for key, size in puts:
            await store.set(key, b"x" * size, 60)
            newest = [(other, length) for other, length in newest if other != key] + [(key, size)]
            while sum(length for _, length in newest) > 20:
                newest.pop(0)
            for other in "abcdef":
                value = await store.get(other)
                assert (None if value is None else len(value)) == dict(newest).get(other)

    asyncio.run(scenario())


async def test_memory_forgets_a_value_after_its_time_and_refuses_one_that_can_never_fit():
    store = MemoryStore(max_bytes=20)
    await store.set("old", b"x" * 10, 0.0)
    assert await store.get("old") is None
    with pytest.raises(StoreUnavailable, match="21 bytes"):
        await store.set("large", b"x" * 21, 60)


def test_a_store_of_another_kind_or_that_has_no_client_is_refused_at_the_start(monkeypatch):
    models = [{"name": "m", "model": "pocket"}]
    with pytest.raises(ConfigError, match="redis://host:6379/0"):
        AppConfig.parse({"models": models, "ingress": {"store": "postgres://a"}})
    monkeypatch.setattr(config_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="manta-serve\\[redis\\]"):
        AppConfig.parse({"models": models, "ingress": {"store": "redis://a"}})
    for secret in ("redis://me:secret@a", "redis://a/0?password=secret", "postgres://:secret@a"):
        with pytest.raises(ConfigError) as error:
            AppConfig.parse({"models": models, "ingress": {"store": secret}})
        assert "secret" not in str(error.value) and "***" in str(error.value)
