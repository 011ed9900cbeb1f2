"""One answer: found in the store, or computed here by a task that no client can break off."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import aclosing

import msgspec

from deployments.frontend.generation import Generation
from deployments.frontend.retry import signed
from deployments.frontend.sequence import Frontend
from deployments.idempotency.errors import AnswerNotReproducible, IdempotencyKeyInUse, LeaseLost
from deployments.idempotency.position import EventIds
from deployments.idempotency.record import Record, answer_key, lease_key
from deployments.idempotency.tape import Tape, TapedGeneration
from deployments.storage.key_value import KeyValueStore, StoreUnavailable
from engine.core.request import seed_of
from engine.wire.messages import GenerateRequest

logger = logging.getLogger(__name__)

LEASE_S = 10.0
"""How long an answer belongs to an ingress that gives no sign."""
RENEW_S = LEASE_S / 4
POLL_S = 0.25  # between two looks at an answer that another ingress computes


class Answer:
    """An answer that this ingress works with."""

    def __init__(
        self,
        stream_id: str,
        record: Record,
        store: KeyValueStore,
        ttl_s: float,
        on_end: Callable[[Answer], None],
        *,
        stored: bool,
    ):
        """on_end: told once nothing more is to be computed. stored: the record comes from the store."""
        self.stream_id, self.record, self._on_end = stream_id, record, on_end
        self.num_requests = 0  #: that are being handled
        self._store, self._ttl_s, self._stored = store, ttl_s, stored
        self._key, self._lease = answer_key(stream_id), lease_key(stream_id)
        self._holder = secrets.token_hex(16).encode()
        self._starting = asyncio.Lock()
        self._tape = Tape(record.outputs)
        self._task: asyncio.Task[None] | None = None

    @property
    def started(self) -> bool:
        """It is computed, or was."""
        return self._task is not None or self._tape.ended

    async def read(
        self,
        frontend: Frontend,
        prompts: list[list[GenerateRequest]],
        client: str,
        fingerprint: str | None,
        ids: EventIds | None,
    ) -> TapedGeneration:
        """Return the answer from its start on, and begin to compute it if nobody did.

        fingerprint: of the model that would compute it. ids: of the stream of whoever reads. Raises StoreUnavailable,
        IdempotencyKeyInUse, AnswerNotReproducible.
        """
        async with self._starting:
            if not self.started:
                leased = False
                if not self._stored:
                    leased = await self._add(fingerprint)
                elif self.record.fingerprint != fingerprint:
                    raise AnswerNotReproducible(self.record.fingerprint, fingerprint)
                self._task = asyncio.create_task(self._run(frontend, self._seeded(prompts), client, leased))
        return TapedGeneration(frontend, prompts, self._tape, ids)

    async def close(self) -> None:
        """Stop computing, so that another ingress may go on; what is complete is stored first."""
        self.cancel()
        if self._task is not None:
            await asyncio.wait([self._task])

    def cancel(self) -> None:
        """Stop computing, unless the answer is complete."""
        if self._task is not None and not self._tape.ended:
            self._task.cancel()

    async def _add(self, fingerprint: str | None) -> bool:
        """Store the record: from now on this answer is promised. Returns whether the lease is this ingress's."""
        self.record.fingerprint = fingerprint
        added, leased = await asyncio.gather(
            self._store.add(self._key, self.record.encode(), self._ttl_s),
            self._store.add(self._lease, self._holder, LEASE_S),
        )
        if not added:
            if leased:
                await self._store.delete(self._lease)
            raise IdempotencyKeyInUse
        self._stored = True
        return leased

    def _seeded(self, prompts: list[list[GenerateRequest]]) -> list[list[GenerateRequest]]:
        """Return the requests with seeds that are the same in each computation. Their ids are not."""
        numbers = iter(range(sum(map(len, prompts))))

        def seeded(request: GenerateRequest) -> GenerateRequest:
            seed = signed(seed_of(f"{self.record.secret}-{next(numbers)}"))
            if request.params.seed is not None:
                return request
            return msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, seed=seed))

        return [[seeded(request) for request in requests] for requests in prompts]

    async def _run(self, frontend: Frontend, prompts: list[list[GenerateRequest]], client: str, leased: bool) -> None:
        try:
            leased = leased or await self._take_over()
            if leased:
                await self._compute(Generation(frontend, prompts, client, self._tape.add))
            self._tape.end()
            if leased:
                await self._save()
        except asyncio.CancelledError:
            await self._fail(LeaseLost())
        except Exception as error:  # noqa: BLE001  whoever reads is told
            await self._fail(error)
        finally:
            self._on_end(self)

    async def _take_over(self) -> bool:
        """Wait until no other ingress computes the answer. Returns False if it is complete then.

        Raises StoreUnavailable, StoredValueCorrupt.
        """
        while True:
            leased = await self._store.add(self._lease, self._holder, LEASE_S)
            record = await Record.load(self._store, self.stream_id) or self.record
            if record.outputs is not None:
                for choice, delta in enumerate(record.outputs):
                    self._tape.add(choice, delta)
            if leased or record.outputs is not None:
                return leased and record.outputs is None
            await asyncio.sleep(POLL_S)

    async def _compute(self, generation: Generation) -> None:
        task = asyncio.current_task()
        assert task is not None
        heartbeat = asyncio.create_task(self._heartbeat(task))
        try:
            async with aclosing(generation.chunks()) as chunks:
                async for _ in chunks:
                    pass
        finally:
            heartbeat.cancel()

    async def _heartbeat(self, task: asyncio.Task[None]) -> None:
        """Renew the lease; cancel the task once another ingress has it."""
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                if not await self._renew():
                    task.cancel()
            except StoreUnavailable as error:  # for other ingresses, too
                logger.warning("no heartbeat of stream_id=%s error=%s", self.stream_id, error)

    async def _renew(self) -> bool:
        """Return whether the answer still belongs to this ingress."""
        return await self._store.extend(self._lease, self._holder, LEASE_S) or await self._store.add(
            self._lease, self._holder, LEASE_S
        )

    async def _save(self) -> None:
        if await self._renew():
            self.record.outputs = self._tape.outputs()
            await self._store.set(self._key, self.record.encode(), self._ttl_s)
            await self._store.delete(self._lease)

    async def _fail(self, error: Exception) -> None:
        """Let the readers know, and other ingresses go on. An answer that nobody has seen is forgotten."""
        if self._tape.ended:
            logger.warning("answer not stored stream_id=%s error=%s", self.stream_id, error)
        else:
            self._tape.end(error)
        try:
            if await self._store.extend(self._lease, self._holder, LEASE_S):
                if not self._tape.deltas:
                    await self._store.delete(self._key)
                await self._store.delete(self._lease)
        except StoreUnavailable as unavailable:
            logger.warning("lease not given back stream_id=%s error=%s", self.stream_id, unavailable)
