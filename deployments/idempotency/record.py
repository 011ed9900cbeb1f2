"""What a store has of an answer: its request, and the tokens once it is complete."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping

import msgspec

from deployments.storage.key_value import KeyValueStore, sealed
from engine.wire.messages import TokenDelta


class Record(msgspec.Struct):
    """One answer. Whatever differs between two computations of a request is fixed here: ids, time and seed."""

    owner: str
    """Name of the API key, or empty."""
    route: str
    body: bytes
    headers: list[tuple[str, str]]
    """Those that count: of the first request, for all that follow."""
    created: int
    """Seconds since 1970."""
    secret: str
    """32 random hex digits, of which seeds and ids are made."""
    fingerprint: str | None = None
    """The model that began it; see ModelInfo."""
    outputs: list[TokenDelta] | None = None
    """What each choice generated, once all have ended."""

    @classmethod
    def new(cls, owner: str, route: str, body: bytes, headers: Mapping[str, str]) -> Record:
        return cls(owner, route, body, [*headers.items()], int(time.time()), secrets.token_hex(16))

    def hex_id(self, name: str) -> str:
        """Return 32 hex digits for something that the request has, the same in each computation."""
        return hashlib.sha256(f"{self.secret} {name}".encode()).hexdigest()[:32]

    def encode(self) -> bytes:
        return sealed(msgspec.msgpack.encode(self))

    @classmethod
    async def load(cls, store: KeyValueStore, stream_id: str) -> Record | None:
        """Raises StoreUnavailable, StoredValueCorrupt."""
        value = await store.get(key := answer_key(stream_id))
        return None if value is None else store.unsealed(key, value, msgspec.msgpack.Decoder(cls).decode)


def stream_id_of(owner: str, key: str) -> str:
    """Return the id of the answer to a key, the same in every ingress. Whoever has not the key cannot guess it."""
    return hashlib.sha256(f"{owner}\0{key}".encode()).hexdigest()[:32]


def answer_key(stream_id: str) -> str:
    """Return the key of an answer in the store."""
    return f"manta:answer:{stream_id}"


def lease_key(stream_id: str) -> str:
    """Return the key of an answer's lease: no answer's, whatever a client takes for the id of a stream."""
    return f"manta:answer-lease:{stream_id}"
