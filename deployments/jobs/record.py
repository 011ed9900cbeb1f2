"""Stored record of a job: its request, and its tokens once it is complete."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping

import msgspec

from deployments.frontend.retry import signed
from deployments.served_adapter import ServedAdapter
from deployments.storage.key_value import KeyValueStore, StoredValueCorrupt, sealed
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import seed_of
from engine.wire.token_delta import TokenDelta


class JobRecord(msgspec.Struct):
    """One job. It fixes everything that could differ between two computations of its request: ids, time, seed
    and adapter."""

    owner: str
    """Name of the API key that created it, or empty."""
    route: str
    body: bytes
    headers: list[tuple[str, str]]
    """Relevant headers of the first request, which apply to all later requests with the same key."""
    created: int
    """Seconds since 1970."""
    secret: str
    """32 random hex digits, from which seeds and ids are derived."""
    fingerprint: str | None = None
    """Fingerprint of the model that began it (ModelInfo)."""
    adapter: ServedAdapter | None = None
    """Adapter that its request named, even if the name belongs to another adapter now; None for no adapter."""
    failed: bool = False
    """Whether its newest computation has failed after some tokens. The next one is charged as a new request."""
    outputs: list[TokenDelta] | None = None
    """Output of each choice, once all have ended."""

    @classmethod
    def new(cls, owner: str, route: str, body: bytes, headers: Mapping[str, str]) -> JobRecord:
        return cls(owner, route, body, [*headers.items()], int(time.time()), secrets.token_hex(16))

    def hex_id(self, name: str) -> str:
        """Return a 32-digit hexadecimal id for a part of the answer, the same in every computation."""
        return hashlib.sha256(f"{self.secret} {name}".encode()).hexdigest()[:32]

    def seeded(self, prompts: list[list[GenerateRequest]]) -> list[list[GenerateRequest]]:
        """Return the requests with seeds that are the same in every computation. Their ids differ."""
        numbers = iter(range(sum(map(len, prompts))))

        def seeded(request: GenerateRequest) -> GenerateRequest:
            seed = signed(seed_of(f"{self.secret}-{next(numbers)}"))
            if request.params.seed is not None:
                return request
            return msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, seed=seed))

        return [[seeded(request) for request in requests] for requests in prompts]

    def encode(self) -> bytes:
        return sealed(msgspec.msgpack.encode(self))

    @classmethod
    async def load(cls, store: KeyValueStore, job_id: str) -> JobRecord | None:
        """Return the stored record of a job, or None. Raises StoreUnavailable, StoredValueCorrupt."""
        value = await store.get(key := record_key(job_id))
        return None if value is None else store.unsealed(key, value, msgspec.msgpack.Decoder(cls).decode)

    async def restore(self, store: KeyValueStore, job_id: str, ttl_s: float) -> bool:
        """Store the record unless the job is stored. Returns whether its answer is still to be computed. Raises
        StoreUnavailable."""
        if await store.add(record_key(job_id), self.encode(), ttl_s):
            return True
        try:
            stored = await JobRecord.load(store, job_id)
        except StoredValueCorrupt:
            return True
        return stored is None or stored.outputs is None


def job_id_of(owner: str, key: str) -> str:
    """Return the job id for an owner's idempotency key, the same in every ingress. The id cannot be guessed without the
    key."""
    return hashlib.sha256(f"{owner}\0{key}".encode()).hexdigest()[:32]


def record_key(job_id: str) -> str:
    return f"manta:job:{job_id}"
