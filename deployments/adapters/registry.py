"""The adapters of one model, as one ingress knows them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from weakref import WeakValueDictionary

from deployments.adapters.adapter import Adapter
from deployments.adapters.dynamic_folder import DynamicFolder
from deployments.adapters.errors import AdapterAlreadyLoaded
from deployments.adapters.sources import AdapterSources
from deployments.adapters.table import AdapterTable
from deployments.frontend.sequence import ReportedError
from deployments.replicas.pools import EnginePool
from engine.errors import InvalidParameter, ServingError

logger = logging.getLogger(__name__)

READ_S = 1.0
"""How old the table may be that an adapter is found in. Ingresses tell each other of changes; one may be too busy."""
READ_AGAIN_S = 0.1  # the same for a name that is not in it


class AdapterRegistry:
    """Adapters of the configuration, with what was loaded and unloaded since then, and of the dynamic folder."""

    def __init__(
        self, model: str, names: Collection[str], config: AdapterSources, table: AdapterTable, pool: EnginePool
    ):
        """names: of the model, which may also stand before an adapter's, with `:` between. pool: its replicas."""
        self.model = model
        self._names, self._config, self._table, self._pool = names, config, table, pool
        self._folder = DynamicFolder(config.dynamic_folder, model, config.max_rank)
        self._configured = {adapter.name: adapter for adapter in config.modules}
        self._known, self._read_at, self._num_heard = self._configured, float("-inf"), 0
        self._reading = asyncio.Lock()
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by name

    async def find(self, name: str) -> Adapter | None:
        """name: may be `model:adapter`. Raises AdapterError for one in the dynamic folder that cannot be used."""
        for short in self._short(name):
            await self._read(READ_S if short in self._known else READ_AGAIN_S)
            if (adapter := self._known.get(short) or await self._folder.find(short)) is not None:
                return adapter
        return None

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and any(
            short in self._known or short in self._folder for short in self._short(name)
        )

    async def listed(self) -> list[tuple[str, str]]:
        """Return name and path of all adapters."""
        await self._read(READ_AGAIN_S)
        known = [(name, adapter.path) for name, adapter in self._known.items()]
        names = await self._folder.names()
        return known + [(name, self._folder.path_of(name)) for name in names if name not in self._known]

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Return once every ingress that answers knows the adapter, and an engine has read it. Raises RequestError,
        AdapterError, ReportedError, EngineUnavailable."""
        if name in self._names or not name.isprintable():
            raise InvalidParameter("lora_name", name, "printable, and not the name of a model that is served")
        async with self._lock(name):
            await self._read(0.0)
            if name in self._known and not in_place:
                raise AdapterAlreadyLoaded(name)
            adapter = await asyncio.to_thread(Adapter.open, name, path, self.model, self._config.max_rank)
            if not await self._pool.asleep() and (error := await self._pool.load_adapter(adapter.lora)) is not None:
                raise ReportedError(error)
            if in_place:
                await self._table.replace(adapter)
            elif not await self._table.add(adapter):
                raise AdapterAlreadyLoaded(name)
            await self._read(0.0)
        logger.info("adapter loaded model=%s adapter=%s digest=%s path=%s", self.model, name, adapter.digest, path)

    async def unload(self, name: str) -> bool:
        """Serve no new requests with an adapter; those that have begun continue. Returns False if there is none of that
        name; those of the dynamic folder cannot be unloaded."""
        async with self._lock(name):
            await self._read(0.0)
            if name not in self._known:
                return False
            await self._table.delete(name, configured=name in self._configured)
            await self._read(0.0)
        logger.info("adapter unloaded model=%s adapter=%s", self.model, name)
        return True

    async def read(self) -> None:
        """Learn of changes, for `in`."""
        await self._read(READ_S)
        await self._folder.read()

    def _short(self, name: str) -> list[str]:
        """Return the names of adapters that a request may mean."""
        model, colon, adapter = name.rpartition(":")
        return [name, adapter] if colon and model in self._names else [name]

    def _lock(self, name: str) -> asyncio.Lock:
        return self._changing.setdefault(name, asyncio.Lock())

    async def _read(self, max_age_s: float) -> None:
        """Read the table, unless it was read lately. If it cannot be read, what is known stays."""
        asked_at = time.monotonic()
        async with self._reading:
            if asked_at - self._read_at < max_age_s and self._num_heard == self._table.num_heard:
                return
            self._num_heard = self._table.num_heard
            try:
                changes = await self._table.changes()
            except ServingError as error:
                logger.warning("adapters stay as they were model=%s error=%s", self.model, error)
            else:
                merged = {**self._configured, **changes}
                self._known = {name: adapter for name, adapter in merged.items() if adapter is not None}
            self._read_at = asked_at
