"""The router's end of the engines' KV event channels. Uses no sockets itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import msgspec

from engine.wire.messages import SUBSCRIPTION_S, EngineUpdate, Subscribe

logger = logging.getLogger(__name__)

RENEW_S = SUBSCRIPTION_S / 3


class Subscriptions:
    """Subscribes to engines, and asks for a new snapshot when an engine's update was lost."""

    address: str  #: where the updates arrive

    def __init__(self, on_update: Callable[[EngineUpdate], bool]):
        """on_update: function that handles an update, and returns False if it needs a snapshot first."""
        self._on_update = on_update
        self._awaiting_snapshot: set[str] = set()
        self._engines: dict[str, str] = {}  # engine id -> address on which it takes commands

    def send(self, address: str, message: bytes) -> None:
        raise NotImplementedError

    def forget(self, address: str) -> None:
        raise NotImplementedError

    def subscribe(self, engines: Mapping[str, str]) -> None:
        """Subscribe to these engines, and unsubscribe from all others. engines: command address by engine id."""
        for engine_id in [engine_id for engine_id in self._engines if engine_id not in engines]:
            self.forget(self._engines.pop(engine_id))
            self._awaiting_snapshot.discard(engine_id)
        for engine_id in [engine_id for engine_id in engines if engine_id not in self._engines]:
            self._engines[engine_id] = engines[engine_id]
            self._send(engine_id, resync=True)

    async def renew(self) -> None:
        """Renew the subscriptions until cancelled."""
        while True:
            await asyncio.sleep(RENEW_S)
            for engine_id in self._engines:
                self._send(engine_id, resync=engine_id in self._awaiting_snapshot)

    def handle(self, update: EngineUpdate) -> None:
        if update.engine_id not in self._engines:
            return  # Serve has reported it gone
        if self._on_update(update):
            self._awaiting_snapshot.discard(update.engine_id)
        elif update.engine_id not in self._awaiting_snapshot:
            logger.info("lost an update engine_id=%s before number=%d", update.engine_id, update.number)
            self._send(update.engine_id, resync=True)

    def _send(self, engine_id: str, *, resync: bool) -> None:
        if resync:
            self._awaiting_snapshot.add(engine_id)
        self.send(self._engines[engine_id], msgspec.msgpack.encode(Subscribe(self.address, resync)))
