"""Adapters found by name, each in a sub-folder of one folder."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

from deployments.parts.adapters.files import open_served
from deployments.parts.adapters.places import Version, place_of
from deployments.served_adapter import ServedAdapter
from engine.lora.errors import AdapterError

MISSING_S = 5.0
"""Seconds after which the folder is searched again for a name that was missing, or whose adapter could not be used."""
MAX_KNOWN = 4096  # names, of each kind
MAX_LISTED = 1000

_Found = tuple[float, Version, ServedAdapter]  # with when its version was looked at


class DynamicFolder:
    """Finds adapters by the names that clients send. A name that leads out of the folder counts as unknown.

    The files of a sub-folder are checked for changes with each request, or in a bucket every few seconds. Changed
    weights count as another adapter.
    """

    def __init__(self, folder: str | None, parent: str, max_rank: int):
        """folder: on a disk or in a bucket; None if the model has no dynamic folder. parent, max_rank: see
        open_served."""
        self._place, self._parent, self._max_rank = place_of(folder), parent, max_rank
        self._found: OrderedDict[str, _Found] = OrderedDict()
        self._missing: OrderedDict[str, tuple[float, AdapterError | None]] = OrderedDict()  # with the end of MISSING_S

    async def find(self, name: str) -> ServedAdapter | None:
        """Return the adapter of this name, or None. Raises AdapterError if it cannot be used."""
        until, error = self._missing.get(name, (0.0, None))
        if time.monotonic() < until:
            if error is not None:
                raise error
            return None
        if (known := self._found.get(name)) is not None and time.monotonic() - known[0] < self._place.fresh_s:
            return known[2]
        try:
            adapter = await asyncio.to_thread(self._open, name)
        except AdapterError as found:
            adapter, error = None, found
        if adapter is None:
            self._missing[name] = time.monotonic() + MISSING_S, error
            _keep_newest(self._missing)
        if error is not None:
            raise error
        return adapter

    def __contains__(self, name: str) -> bool:
        """Return whether there is an adapter of this name. For a bucket, the answer dates from the last `read`."""
        return name in self._place

    async def read(self) -> None:
        """Update the names that `in` finds. Raises AdapterError."""
        await asyncio.to_thread(self._place.read)

    async def names(self) -> list[str]:
        """Return the first MAX_LISTED names in alphabetical order. Raises AdapterError."""
        return (await asyncio.to_thread(self._place.names))[:MAX_LISTED]

    def path_of(self, name: str) -> str:
        return self._place.path_of(name)

    def _open(self, name: str) -> ServedAdapter | None:
        looked_at, known = time.monotonic(), self._found.get(name)
        try:
            version = self._place.version(name)
        except AdapterError:
            if known is None:
                raise
            version = known[1]  # the bucket cannot be read; engines may still have what was
        if version is None:
            return None
        if known is not None and known[1] == version:
            adapter = known[2]
        else:
            adapter = open_served(name, self.path_of(name), self._parent, self._max_rank)
        self._found[name] = looked_at, version, adapter
        _keep_newest(self._found)
        return adapter


def _keep_newest(names: OrderedDict[str, _Found] | OrderedDict[str, tuple[float, AdapterError | None]]) -> None:
    while len(names) > MAX_KNOWN:
        names.popitem(last=False)
