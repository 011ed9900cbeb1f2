"""Lists a store again and again, on rank 0, since other engines write to it and delete from it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from engine.kv_offload.store import StoreFolder
from engine.wire.parts.kv_offload import StoreListing

logger = logging.getLogger(__name__)

LIST_S = 5.0  # between two listings of the store, at least
LIST_SHARE = 20  # a listing is followed by a wait of so many times its duration, at least: a store may cost per request
CLEAN_S = 3600.0  # between two deletions of what nobody will read

NOTHING = StoreListing([], [])


class StoreLister:
    """Reports what a store has gained and lost, and deletes what nobody will read."""

    def __init__(self, store: StoreFolder, list_s: float = LIST_S, ttl_s: float | None = None, temporary_key: str = ""):
        """list_s: seconds between two listings. ttl_s, temporary_key: as for `StoreFolder.delete_stale`."""
        self._store, self._list_s, self._ttl_s, self._temporary_key = store, list_s, ttl_s, temporary_key

    def run(self, report: Callable[[StoreListing], None], closing: threading.Event) -> None:
        """Call `report` with the first listing, and with each that tells something, until `closing` is set."""
        store, is_reachable, is_first, clean_at = self._store, True, True, 0.0
        while True:
            began_at = time.monotonic()
            try:
                listing = store.list()
                if is_first or listing != NOTHING:
                    is_first = False
                    report(listing)
                if time.monotonic() >= clean_at:
                    store.delete_stale(self._ttl_s, self._temporary_key)
                    clean_at = time.monotonic() + CLEAN_S
                is_reachable = True
            except Exception as error:  # noqa: BLE001 - what it has is known from the listing before
                if is_reachable:
                    logger.warning("%s cannot be listed: %s", store.url, error)
                is_reachable = False
            if closing.wait(max(self._list_s, LIST_SHARE * (time.monotonic() - began_at))):
                return
