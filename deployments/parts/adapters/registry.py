"""The adapters of one model that one ingress knows."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from weakref import WeakValueDictionary

from deployments.frontend.retry import BACK_OFF_S, ENGINE_GONE
from deployments.frontend.sequence import ReportedError
from deployments.parts.adapters.dynamic_folder import DynamicFolder
from deployments.parts.adapters.errors import AdapterAlreadyLoaded
from deployments.parts.adapters.files import open_served
from deployments.parts.adapters.sources import AdapterSources
from deployments.parts.adapters.table import AdapterTable
from deployments.poison.named import named_adapter
from deployments.poison.poison import Poison
from deployments.replicas.pools import EnginePool
from deployments.served_adapter import ServedAdapter
from engine.black_box import found_keys
from engine.errors import EngineUnavailable, InvalidParameter, ServingError
from engine.lora.messages import AdapterLoaded, LoadAdapter
from engine.wire.parts.adapter import ModelAdapter

logger = logging.getLogger(__name__)

READ_S = 1.0
"""Maximum age in seconds of the table in which an adapter is looked up. Ingresses tell each other of changes, but one
may be too busy to do so."""
READ_AGAIN_S = 0.1  # the same for a name that is not in it
LOAD_ATTEMPTS = 3  # engines that are asked to read an adapter, one after the other, if those before are lost
LOAD_TIMEOUT_S = 120.0  # of all attempts together; the adapter's files may be on a slow disk


class AdapterRegistry:
    """Finds adapters in the configuration, among those loaded at run time, and in the dynamic folder."""

    def __init__(
        self,
        model: str,
        names: Collection[str],
        config: AdapterSources,
        table: AdapterTable,
        pool: EnginePool,
        poison: Poison,
    ):
        """names: names of the model, which clients may also put before an adapter's name, as `model:adapter`. pool:
        replicas of the model. poison: what this ingress refuses because engines have ended with it."""
        self._poison = poison
        self.model = model
        self._names, self._config, self._table, self._pool = names, config, table, pool
        self._folder = DynamicFolder(config.dynamic_folder, model, config.max_rank)
        self._configured = {adapter.name: adapter for adapter in config.modules}
        self._known, self._read_at, self._num_heard = self._configured, float("-inf"), 0
        self._reading = asyncio.Lock()
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by name

    async def find(self, name: str) -> ServedAdapter | None:
        """Return the adapter of a name, which may be `model:adapter`; None if there is none. Raises AdapterError for an
        adapter of the dynamic folder that cannot be used."""
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
        """Return (name, path) of all adapters."""
        await self._read(READ_AGAIN_S)
        known = [(name, adapter.path) for name, adapter in self._known.items()]
        names = await self._folder.names()
        return known + [(name, self._folder.path_of(name)) for name in names if name not in self._known]

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Load an adapter. Returns once an engine has read it and every ingress that answers knows it. Raises
        RequestError, AdapterError, PoisonRequest, ReportedError, EngineUnavailable."""
        if name in self._names or not name.isprintable():
            raise InvalidParameter("lora_name", name, "printable, and not the name of a served model")
        async with self._lock(name):
            await self._read(0.0)
            if name in self._known and not in_place:
                raise AdapterAlreadyLoaded(name)
            adapter = await asyncio.to_thread(open_served, name, path, self.model, self._config.max_rank)
            self._poison.check_named(named_adapter(adapter.record), _now())
            if not await self._pool.asleep():
                await self._load_in_engine(adapter.record)
            if in_place:
                await self._table.replace(adapter)
            elif not await self._table.add(adapter):
                raise AdapterAlreadyLoaded(name)
            await self._read(0.0)
        logger.info("adapter loaded model=%s adapter=%s digest=%s path=%s", self.model, name, adapter.digest, path)

    async def unload(self, name: str) -> bool:
        """Stop serving new requests with an adapter; requests that have begun continue. Returns False if the name is
        unknown, or is found only in the dynamic folder, whose adapters cannot be unloaded."""
        async with self._lock(name):
            await self._read(0.0)
            if name not in self._known:
                return False
            await self._table.delete(name, configured=name in self._configured)
            await self._read(0.0)
        logger.info("adapter unloaded model=%s adapter=%s", self.model, name)
        return True

    async def read(self) -> None:
        """Update the names that `in` finds."""
        await self._read(READ_S)
        await self._folder.read()

    async def _load_in_engine(self, lora: ModelAdapter) -> None:
        """Make an engine read an adapter. If the engine is lost, ask another one: the router avoids an engine that has
        just lost a call, if there are others. Raises PoisonRequest, ReportedError, EngineUnavailable."""
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                for attempt in range(1, LOAD_ATTEMPTS):
                    try:
                        return await self._ask_engine(lora)
                    except ServingError as error:
                        if error.code not in ENGINE_GONE:
                            raise
                        logger.warning(
                            "adapter is read by another engine model=%s adapter=%s attempt=%d: %s",
                            self.model, lora.name, attempt, error,
                        )  # fmt: skip
                    await asyncio.sleep(attempt * BACK_OFF_S)
                await self._ask_engine(lora)
        except TimeoutError:
            raise EngineUnavailable(f"no engine has read the adapter within {LOAD_TIMEOUT_S:g} s") from None

    async def _ask_engine(self, lora: ModelAdapter) -> None:
        named = named_adapter(lora)
        try:
            answers = await self._pool.ask_one(LoadAdapter(lora), AdapterLoaded, lora.digest)
        except EngineUnavailable as lost:
            if found_keys(lost.doing, [named.digest]):
                poison = self._poison.blame(named, lost.doing, on_trial=False, now=_now())
                raise lost if poison is None else poison from None
            raise
        if (error := next((each.error for each in answers if each.error is not None), None)) is not None:
            raise ReportedError(error)

    def _short(self, name: str) -> list[str]:
        """Return the names of adapters that a client may mean by `name`."""
        model, colon, adapter = name.rpartition(":")
        return [name, adapter] if colon and model in self._names else [name]

    def _lock(self, name: str) -> asyncio.Lock:
        return self._changing.setdefault(name, asyncio.Lock())

    async def _read(self, max_age_s: float) -> None:
        """Read the table, unless it was read within `max_age_s` and has not changed since. If it cannot be read, keep
        the known adapters."""
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


def _now() -> float:
    return asyncio.get_running_loop().time()
