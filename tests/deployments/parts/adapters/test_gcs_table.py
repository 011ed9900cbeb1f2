"""The adapters of two ingresses over one store, whose calls come in any order. On Ray's own store:
tests/serve/plain/test_adapters.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any
from unittest import mock

import hypothesis.strategies as st
from hypothesis import given, settings

from deployments import ray_compat
from deployments.parts.adapters import gcs_table
from deployments.parts.adapters.gcs_table import GcsTable
from deployments.served_adapter import ServedAdapter
from tests.examples import examples


class Store(dict[str, bytes]):
    """What ray_compat keeps in the GCS. Each call waits until it is chosen from those that wait."""

    def __init__(self, order: list[int]):
        self._order, self._waiting = order, list[asyncio.Event]()

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        chosen = asyncio.Event()
        self._waiting.append(chosen)
        await chosen.wait()
        return function(*args)

    async def run(self, *calls: Coroutine[Any, Any, Any]) -> list[Any]:
        tasks = [asyncio.create_task(call) for call in calls]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            if self._waiting:
                number = self._order.pop() if self._order else 0
                self._waiting.pop(number % len(self._waiting)).set()
        return [task.result() for task in tasks]

    def share_first(self, name: str, value: bytes) -> bool:
        return self.setdefault(name, value) is value

    def below(self, prefix: str) -> dict[str, bytes]:
        return {name.removeprefix(prefix): value for name, value in self.items() if name.startswith(prefix)}

    def patched(self) -> Any:
        functions = {
            "share": self.__setitem__,
            "shared": self.get,
            "share_first": self.share_first,
            "unshare": lambda name: self.pop(name, None),
            "shared_below": self.below,
        }
        return mock.patch.multiple(ray_compat, **functions)


def adapter(digest: str) -> ServedAdapter:
    return ServedAdapter("sql", "/adapters/sql", digest, "base", 1)


async def nobody() -> None:
    pass


@given(
    before=st.sampled_from(["nothing", "unloaded", "loaded"]),
    deletes=st.booleans(),
    order=st.lists(st.integers(0, 3), max_size=24),
)
@settings(max_examples=examples(400), deadline=None)
def test_of_two_ingresses_that_load_one_name_one_wins_and_both_see_the_same(before, deletes, order):
    async def scenario() -> None:
        store = Store(order)
        one, other = GcsTable("app/base", nobody), GcsTable("app/base", nobody)
        with store.patched(), mock.patch.object(gcs_table, "_call", store.call):
            if before == "unloaded":
                await store.run(one.delete("sql", configured=True))
            elif before == "loaded":
                await store.run(one.add(adapter("old")))
            calls = [one.add(adapter("1")), other.add(adapter("2")), other.changes()]
            unload = [one.delete("sql", configured=True)] if deletes else []
            results = await store.run(*calls, *unload)
            added = [digest for digest, won in zip("12", results[:2], strict=True) if won]
            seen = await store.run(one.changes(), other.changes(), GcsTable("app/base", nobody).changes())
        assert seen[0] == seen[1] == seen[2]
        now = seen[0]["sql"]
        if deletes:
            assert now is None or now.digest in added
        else:
            assert added == ([] if before == "loaded" else [now.digest])

    asyncio.run(scenario())
