"""Adapters that are found by their names, each in a sub-folder of one folder."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from pathlib import Path

from deployments.adapters.adapter import Adapter
from engine.errors import AdapterError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MISSING_S = 5.0
"""How long a name counts as missing, or as that of an adapter that cannot be used, without another look."""
MAX_KNOWN = 4096  # names, of each kind
MAX_LISTED = 1000

_Version = tuple[int, ...]


class DynamicFolder:
    """Looks up names that clients send, so it never leaves its folder, nor follows a link out of it.

    What a sub-folder has is looked at with each request: other weights make another adapter.
    """

    def __init__(self, folder: str | None, parent: str, max_rank: int):
        """folder: None for one without adapters. parent, max_rank: see Adapter.open."""
        self._root = None if folder is None else Path(folder).expanduser().resolve()
        self._parent, self._max_rank = parent, max_rank
        self._found: OrderedDict[str, tuple[_Version, Adapter]] = OrderedDict()
        self._missing: OrderedDict[str, tuple[float, AdapterError | None]] = OrderedDict()  # with the end of MISSING_S

    async def find(self, name: str) -> Adapter | None:
        """Raises AdapterError for an adapter that cannot be used."""
        if self._root is None:
            return None
        until, error = self._missing.get(name, (0.0, None))
        if time.monotonic() < until:
            if error is not None:
                raise error
            return None
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
        return self._files_of(name) is not None

    def names(self) -> list[str]:
        """Return the first MAX_LISTED names in their order."""
        if self._root is None or not self._root.is_dir():
            return []
        return sorted(path.name for path in self._root.iterdir() if path.name in self)[:MAX_LISTED]

    def path_of(self, name: str) -> str:
        return str((self._root or Path()) / name)

    def _open(self, name: str) -> Adapter | None:
        if (files := self._files_of(name)) is None:
            return None
        version = tuple(number for file in files for number in _version(file))
        known = self._found.get(name)
        if known is not None and known[0] == version:
            return known[1]
        adapter = Adapter.open(name, self.path_of(name), self._parent, self._max_rank)
        self._found[name] = version, adapter
        _keep_newest(self._found)
        return adapter

    def _files_of(self, name: str) -> list[Path] | None:
        """Return the files of an adapter; None if there is none of that name."""
        if self._root is None or not name or name.startswith(".") or not name.isprintable() or {"/", "\\"} & {*name}:
            return None
        try:
            files = [(self._root / name / file).resolve(strict=True) for file in (CONFIG, WEIGHTS)]
        except OSError:  # it is not there, or its name is too long
            return None
        return files if all(file.is_file() and file.is_relative_to(self._root) for file in files) else None


def _version(file: Path) -> _Version:
    found = file.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _keep_newest(
    names: OrderedDict[str, tuple[_Version, Adapter]] | OrderedDict[str, tuple[float, AdapterError | None]],
) -> None:
    while len(names) > MAX_KNOWN:
        names.popitem(last=False)
