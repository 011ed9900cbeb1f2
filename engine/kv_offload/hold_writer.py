"""Writes the holds of one tier in its thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from engine.kv_offload.disk import DiskFolder
from engine.kv_offload.store import StoreFolder, Unreachable
from engine.wire.parts.kv_offload import DropHold, SaveHold

logger = logging.getLogger(__name__)

MAX_WAITING = 4096  # changes; each names all blocks of a hold


class HoldWriter:
    """Writes and deletes holds, in the order of their first changes. Of the changes of one hold that wait, only the
    newest is carried out. While a disk or store hangs, at most MAX_WAITING holds wait, and changes of others are lost.

    If a write fails or is lost, the next start does not find the hold; if a deletion is, its blocks are kept until its
    time is over.
    """

    def __init__(self, folder: DiskFolder | StoreFolder, run: Callable[[Callable[[], None]], None]):
        """run: queues a task for the thread. The tasks of one writer must run in order, one at a time."""
        self._folder, self._run = folder, run
        self._waiting: dict[bytes, SaveHold | DropHold] = {}
        self._lock = threading.Lock()

    def submit(self, command: SaveHold | DropHold) -> None:
        name = command.name
        with self._lock:
            is_new = name not in self._waiting
            if is_new and len(self._waiting) >= MAX_WAITING:
                logger.warning("a change of a hold is lost, because %d wait to be written", MAX_WAITING)
                return
            self._waiting[name] = command
        if is_new:
            self._run(lambda: self._change(name))

    def _change(self, name: bytes) -> None:
        with self._lock:
            command = self._waiting.pop(name)
        try:
            if isinstance(command, SaveHold):
                self._folder.save_hold(name, command.hold)
            else:
                self._folder.drop_hold(name)
        except (OSError, Unreachable) as error:
            logger.warning("a hold could not be written or deleted: %s", error)
