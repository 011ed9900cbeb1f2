"""Where tokens arrive at an ingress: one ZMQ socket, fed by every engine that works for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import msgspec
import zmq
import zmq.asyncio

from engine.messages import TokenBatch, TokenDelta

logger = logging.getLogger(__name__)


class TokenChannel:
    """Sorts the deltas of all engines into the inboxes of the requests they belong to.

    address: what goes into `GenerateRequest.reply_to`.
    dropped: deltas that came for nobody; some are normal after a client went away.
    """

    def __init__(self, host: str):
        self.dropped = 0
        self._inboxes: dict[str, asyncio.Queue[TokenDelta | None]] = {}
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.address = f"tcp://{host}:{port}"
        self._decode = msgspec.msgpack.Decoder(TokenBatch).decode

    def open(self, request_ids: Iterable[str]) -> asyncio.Queue[TokenDelta | None]:
        """One inbox for all these requests. None never comes from an engine: the caller may use it to wake up."""
        inbox: asyncio.Queue[TokenDelta | None] = asyncio.Queue()
        for request_id in request_ids:
            assert request_id not in self._inboxes, request_id
            self._inboxes[request_id] = inbox
        return inbox

    def close(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._inboxes.pop(request_id, None)

    async def run(self) -> None:
        """Dispatch until cancelled, then close the socket."""
        try:
            while True:
                self._dispatch(await self._socket.recv())
        finally:
            self._context.destroy(linger=0)

    def _dispatch(self, message: bytes) -> None:
        try:
            batch = self._decode(message)
        except msgspec.MsgspecError as error:
            logger.error("dropped a malformed token batch: %s", error)
            return
        for delta in batch.deltas:
            inbox = self._inboxes.get(delta.request_id)
            if inbox is None:
                self.dropped += 1
            else:
                inbox.put_nowait(delta)
