"""A subscriber of KV events as vLLM's example has it (examples/features/kv_events/kv_events_subscriber.py): vLLM's
definition of the messages, and what is missed is asked for again. It keeps a mirror of the cache."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from engine.wire.block_hash import block_hash, root_hash

PATIENCE_MS = 60_000


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class Mirror:
    """The blocks of each KV cache group, as the events tell of them."""

    def __init__(self) -> None:
        self.groups: dict[int, dict[bytes | int, BlockStored]] = {}
        self.events: list[KVCacheEvent] = []
        self.decode = msgspec.msgpack.Decoder(KVEventBatch).decode

    def take(self, payload: bytes) -> None:
        for event in self.decode(payload).events:
            self.events.append(event)
            match event:
                case AllBlocksCleared():
                    self.groups.clear()
                case BlockStored():
                    assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                    assert event.medium == "GPU" and event.lora_id is None and event.group_idx is not None
                    blocks = self.groups.setdefault(event.group_idx, {})
                    assert not blocks.keys() & set(event.block_hashes), "stored twice"
                    blocks |= dict.fromkeys(event.block_hashes, event)
                case BlockRemoved():
                    assert event.group_idx is not None
                    for each in event.block_hashes:
                        del self.groups[event.group_idx][each]

    def hashes(self, group: int = 0) -> set[bytes | int]:
        return set(self.groups.get(group, {}))


def check_chain(event: BlockStored, hashed_tokens: int, salt: str = "") -> None:
    """Whether these tokens after this parent have these hashes."""
    parent = event.parent_block_hash or root_hash(salt)
    assert isinstance(parent, bytes)
    for start in range(0, len(event.token_ids), hashed_tokens):
        parent = block_hash(parent, event.token_ids[start : start + hashed_tokens])
        if (start + hashed_tokens) % event.block_size == 0:
            assert parent == event.block_hashes[start // event.block_size]
    assert parent == event.block_hashes[-1]


class Subscriber:
    """Reads batches, and asks again for those that it missed. lose: numbers of batches that do not arrive."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = ""):
        self.mirror, self.last, self.topic = Mirror(), -1, topic
        self.lose: set[int] = set()
        self.replayed: list[int] = []
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.connect(endpoint)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._replay = self._context.socket(zmq.DEALER)  # REQ would take one reply only
        self._replay.connect(replay_endpoint)

    def is_live(self) -> bool:
        """Whether a batch has come by subscription."""
        return bool(self._sub.poll(100))

    def skip(self) -> None:
        """Lose the next batch."""
        self._sub.recv_multipart()

    def read(self, until: int) -> None:
        """Take all batches up to number `until`."""
        while self.last < until:
            assert self._sub.poll(PATIENCE_MS), f"batch {self.last + 1} has not come"
            topic, number, payload = self._sub.recv_multipart()
            assert topic == self.topic.encode()
            seq = int.from_bytes(number, "big")
            if seq in self.lose:
                continue
            if seq > self.last + 1:
                self.catch_up()
            if seq > self.last:
                self.mirror.take(payload)
                self.last = seq

    def catch_up(self) -> None:
        """Take all batches after the last one from the replay socket."""
        self._replay.send_multipart([b"", (self.last + 1).to_bytes(8, "big")])
        while True:
            assert self._replay.poll(PATIENCE_MS)
            empty, topic, number, payload = self._replay.recv_multipart()
            assert empty == b""
            seq = int.from_bytes(number, "big", signed=True)
            if not payload:
                assert (seq, topic) == (-1, b"")
                return
            assert topic == self.topic.encode() and seq == self.last + 1
            self.mirror.take(payload)
            self.replayed.append(seq)
            self.last = seq

    def close(self) -> None:
        self._context.destroy(linger=0)
