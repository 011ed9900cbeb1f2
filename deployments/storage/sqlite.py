"""Values in an SQLite file, shared by the ingresses of one machine.

When a call returns, its change is on disk (WAL, fsync at each commit). One thread does all the work. Calls that arrive
during a commit share the next one, so one fsync serves many requests.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from deployments.storage.key_value import KeyValueStore
from engine.errors import ConfigError
from engine.user_folder import given_folder, private_file

T = TypeVar("T")
LOCK_TIMEOUT_S = 2.0  # how long another ingress may lock the file
TIMEOUT_S = 10.0  # of each call; more than LOCK_TIMEOUT_S
MAX_CALLS = 256  # in one commit
CLEAN_UP_S = 60.0  # between two removals of expired values
BESIDE = ("", "-journal", "-wal", "-shm")  # ends of the names of all files that SQLite writes
Call = tuple[Callable[[sqlite3.Connection], Any], "asyncio.Future[Any]"]


class SqliteStore(KeyValueStore):
    shared = True

    def __init__(self, path: str, max_bytes: int):
        """Create the file and its folder if missing. Raises ConfigError if the file cannot be opened."""
        super().__init__()
        file = Path(path)
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        try:
            given_folder(file.parent)
            for suffix in BESIDE:  # they contain prompts and answers
                private_file(file.with_name(file.name + suffix))
            self._database = _open(file, max_bytes)
            file.with_name(f"{file.name}-journal").unlink(missing_ok=True)  # nobody uses it from now on
        except (OSError, sqlite3.Error) as error:
            raise ConfigError("ingress.store", path, f"a writable SQLite file ({error})") from None
        self._cleaned_up_at = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._work, daemon=True, name="sqlite")
        self._thread.start()

    async def get(self, key: str) -> bytes | None:
        return await self._run(lambda database: _get(database, key))

    async def set(self, key: str, value: bytes, ttl_s: float) -> None:
        await self._run(lambda database: _set(database, key, value, ttl_s))

    async def replace(self, key: str, expected: bytes | None, value: bytes, ttl_s: float) -> bool:
        return await self._run(lambda database: _replace(database, key, expected, value, ttl_s))

    async def delete(self, key: str) -> None:
        await self._run(lambda database: database.execute("delete from stored where key = ?", (key,)))

    async def close(self) -> None:
        self._closed = True
        self._calls.put(None)
        await asyncio.to_thread(self._thread.join)

    async def _run(self, call: Callable[[sqlite3.Connection], T]) -> T:
        if self._closed:
            raise self.unavailable("it is closed")
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.put((call, result))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await result
        except TimeoutError:
            raise self.unavailable(f"the disk did not answer within {TIMEOUT_S:g} s") from None
        except sqlite3.Error as error:
            raise self.unavailable(f"{type(error).__name__}: {error}") from error

    def _work(self) -> None:
        while True:
            calls = [self._calls.get()]
            while not self._calls.empty() and len(calls) < MAX_CALLS:
                calls.append(self._calls.get())
            self._clean_up()
            self._commit([call for call in calls if call is not None])
            if None in calls:
                self._database.close()
                return

    def _clean_up(self) -> None:
        """Remove expired values, before new values need their space."""
        if time.monotonic() > self._cleaned_up_at + CLEAN_UP_S:
            self._cleaned_up_at = time.monotonic()
            with suppress(sqlite3.Error):  # the next calls will report it
                self._database.execute("delete from stored where expires_at <= ?", (time.time(),))

    def _commit(self, calls: list[Call]) -> None:
        """Run all calls in one transaction. If that fails, run each call in its own transaction, so that no call fails
        because of another."""
        begun = False
        try:
            self._database.execute("begin immediate")
            begun = True
            results = [call(self._database) for call, _ in calls]
            self._database.execute("commit")
        except sqlite3.Error as error:
            if self._database.in_transaction:
                self._database.execute("rollback")
            if len(calls) == 1 or not begun:  # if the file is locked, single calls would fail too
                _settle([(future, error) for _, future in calls])
            else:
                for call in calls:
                    self._commit([call])
        else:
            _settle([(future, result) for (_, future), result in zip(calls, results, strict=True)])


def _open(file: Path, max_bytes: int) -> sqlite3.Connection:
    database = sqlite3.connect(file, LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    database.execute("pragma journal_mode = wal")
    database.execute("pragma synchronous = full")
    (page_size,) = database.execute("pragma page_size").fetchone()
    database.execute(f"pragma max_page_count = {max(16, max_bytes // page_size)}")
    database.execute(
        "create table if not exists stored (key text primary key, value blob not null, expires_at real not null)"
    )
    database.execute("create index if not exists by_time on stored (expires_at)")
    return database


def _get(database: sqlite3.Connection, key: str) -> bytes | None:
    found = database.execute("select value from stored where key = ? and expires_at > ?", (key, time.time()))
    row = found.fetchone()
    return None if row is None else row[0]


def _set(database: sqlite3.Connection, key: str, value: bytes, ttl_s: float) -> None:
    database.execute("insert or replace into stored values (?, ?, ?)", (key, value, time.time() + ttl_s))


def _replace(database: sqlite3.Connection, key: str, expected: bytes | None, value: bytes, ttl_s: float) -> bool:
    if _get(database, key) != expected:
        return False
    _set(database, key, value, ttl_s)
    return True


def _settle(results: list[tuple[asyncio.Future[Any], Any]]) -> None:
    """Deliver results to their waiting callers, skipping those that have left. Wakes the event loop only once."""

    def settle() -> None:
        for future, result in results:
            if not future.done():
                if isinstance(result, sqlite3.Error):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    if results:
        with suppress(RuntimeError):  # the loop has ended
            results[0][0].get_loop().call_soon_threadsafe(settle)
