"""An AdapterTable in the store of Ray's GCS. It lasts as long as the cluster, even if ingresses and replicas die."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

import msgspec

from deployments import ray_compat
from deployments.parts.adapters.table import Changes
from deployments.served_adapter import ServedAdapter
from engine.errors import EngineUnavailable

T = TypeVar("T")
P = ParamSpec("P")
TIMEOUT_S = 5.0  # of each call; the GCS may be away for a while


class GcsTable:
    """Stores a value for each loaded adapter, a mark for each configured adapter that was unloaded, and a version. The
    version changes with every change. While it is the same, nothing else is read. A loaded adapter overrides the mark
    of the same name, so loading that name again only adds a value. If two ingresses do so at once, one fails."""

    def __init__(self, scope: str, tell_others: Callable[[], Awaitable[object]]):
        """scope: identifies the model and its weights, which the adapters must fit. tell_others: function called after
        each change, to tell the other ingresses, which count changes in `num_heard`."""
        self.num_heard = 0
        self._entries, self._unloaded = f"adapters/{scope}/entry/", f"adapters/{scope}/unloaded/"
        self._version = f"adapters/{scope}/version"
        self._tell_others = tell_others
        self._read: tuple[bytes | None, Changes] = (None, {})

    async def changes(self) -> Changes:
        version = await _call(ray_compat.shared, self._version)  # read first: a change after it is seen next time
        if version != self._read[0]:
            self._read = version, await _call(self._read_all)
        return self._read[1]

    async def add(self, adapter: ServedAdapter) -> bool:
        added = await _call(ray_compat.share_first, self._entries + adapter.name, msgspec.msgpack.encode(adapter))
        await self._changed()
        return added

    async def replace(self, adapter: ServedAdapter) -> None:
        await _call(ray_compat.share, self._entries + adapter.name, msgspec.msgpack.encode(adapter))
        await self._changed()

    async def delete(self, name: str, *, configured: bool) -> None:
        if configured:
            await _call(ray_compat.share, self._unloaded + name, b"")
        await _call(ray_compat.unshare, self._entries + name)
        await self._changed()

    async def _changed(self) -> None:
        await _call(ray_compat.share, self._version, secrets.token_bytes(8))
        await self._tell_others()

    def _read_all(self) -> Changes:
        loaded = ray_compat.shared_below(self._entries)
        return {
            **dict.fromkeys(ray_compat.shared_below(self._unloaded)),
            **{name: msgspec.msgpack.decode(value, type=ServedAdapter) for name, value in loaded.items()},
        }


async def _call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function of the GCS in a thread. Raises EngineUnavailable if the GCS does not answer within TIMEOUT_S."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await asyncio.to_thread(function, *args, **kwargs)
    except Exception as error:  # Ray has no class of its own for these
        raise EngineUnavailable(f"the table of adapters cannot be reached ({error!r}); send it again") from error
