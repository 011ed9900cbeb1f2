"""ZMQ sockets from which anybody reads KV events: vLLM's protocol, without authentication."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

import msgspec
import zmq

from engine.errors import ConfigError
from engine.options.kv_events import KVEventsConfig
from engine.wire.parts.kv_events import KVCacheEvent, KVEventBatch

logger = logging.getLogger(__name__)

LOOPBACK = "tcp://127.0.0.1:5557"
PORTS = 64  # tried from the configured one on, if engines of one machine share it
REPLAY_S = 5.0  # after which a replay ends whose reader makes no room
END = (-1).to_bytes(8, "big", signed=True)


class KVEventSockets:
    """A PUB socket for batches of events, and a ROUTER socket that sends recent ones again.

    A message has three frames: topic, sequence number (8 bytes, big endian, from 0), msgpack. The engine never waits: a
    subscriber that is too slow loses messages, and sees a gap in the numbers. The subscriber sends [empty, number] to
    the ROUTER, and gets [empty, topic, number, msgpack] for each message kept from that number on, then one with number
    -1, without a topic or events. An engine whose ports are taken uses the next pair that is free. Protocol after
    vLLM's ZmqEventPublisher.
    """

    def __init__(self, config: KVEventsConfig):
        """Raises ConfigError if an address cannot be used."""
        self._topic = config.topic.encode()
        self._number = 0  # of the next batch
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps if config.replay_endpoint else 0)
        self._lock = threading.Lock()  # of `_kept`
        self._encode = msgspec.msgpack.Encoder().encode
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._pub, router = self._open(config)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._replays = threading.Thread(target=self._serve, args=[router], name="kv-event-replays", daemon=True)
        self._replays.start()

    def send(self, events: list[KVCacheEvent]) -> None:
        """Send a batch to all subscribers that have room for it."""
        payload = self._encode(KVEventBatch(time.time(), events))
        with self._lock:
            self._kept.append((self._number, payload))
        self._pub.send_multipart([self._topic, self._number.to_bytes(8, "big"), payload])
        self._number += 1

    def close(self) -> None:
        """Close the sockets; what subscribers have not taken is lost."""
        self._pub.close()
        self._context.term()  # ends the thread, and waits for its socket
        self._replays.join()

    def _open(self, config: KVEventsConfig) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """Return the PUB socket, and the ROUTER socket, which has no address unless replays are configured."""
        endpoint = config.endpoint or LOOPBACK
        listens = config.endpoint is None or endpoint.startswith("ipc://") or "*" in endpoint or "::" in endpoint
        for offset in range(PORTS):
            pub, router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
            key, address = "endpoint", shifted(endpoint, offset) if listens else endpoint
            pub.setsockopt(zmq.SNDHWM, config.hwm)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else a slow reader would miss parts of a replay
            router.setsockopt(zmq.SNDTIMEO, round(REPLAY_S * 1000))
            try:
                for socket in (pub, router):
                    socket.setsockopt(zmq.LINGER, 0)
                    socket.setsockopt(zmq.IPV6, int("::" in endpoint))
                (pub.bind if listens else pub.connect)(address)
                if config.replay_endpoint is not None:
                    key, replays = "replay_endpoint", shifted(config.replay_endpoint, offset)
                    router.bind(replays)
                    logger.info("replays KV events at %s", replays)
                logger.info("%s KV events, with the tokens of prompts, at %s", "binds" if listens else "sends", address)
                return pub, router
            except zmq.ZMQError as error:
                pub.close()
                router.close()
                if error.errno != zmq.EADDRINUSE or offset == PORTS - 1:
                    limit = f"an address that ZMQ can use: {error}"
                    raise ConfigError(f"kv_events_config.{key}", getattr(config, key), limit) from error
        raise AssertionError("not reached")

    def _serve(self, router: zmq.Socket[bytes]) -> None:
        """Answer requests for replays until the context ends."""
        with router:
            while True:
                try:
                    self._replay(router, router.recv_multipart())
                except zmq.ContextTerminated:
                    return
                except zmq.ZMQError as error:
                    logger.warning("a replay of KV events was broken off: %s", error)

    def _replay(self, router: zmq.Socket[bytes], request: list[bytes]) -> None:
        if len(request) != 3 or len(request[2]) != 8:
            logger.warning(
                "ignored a request for KV events: %d frames, instead of an empty one and a number", len(request)
            )
            return
        peer, first = request[0], int.from_bytes(request[2], "big")
        with self._lock:
            wanted = [batch for batch in self._kept if batch[0] >= first]
        for number, payload in wanted:
            router.send_multipart([peer, b"", self._topic, number.to_bytes(8, "big"), payload])
        router.send_multipart([peer, b"", b"", END, b""])


def shifted(endpoint: str, offset: int) -> str:
    """Return an endpoint with its TCP port raised by `offset`."""
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + offset}" if endpoint.startswith("tcp:") and port.isdigit() else endpoint
