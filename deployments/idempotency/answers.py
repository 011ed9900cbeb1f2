"""The answers to requests with an Idempotency-Key, as one ingress knows them."""

from __future__ import annotations

import asyncio

from deployments.frontend.sequence import Frontend
from deployments.idempotency.answer import Answer
from deployments.idempotency.errors import StreamNotFound
from deployments.idempotency.position import MAX_CHOICES, EventIds, Position
from deployments.idempotency.record import Record
from deployments.idempotency.tape import TapedGeneration
from deployments.storage.key_value import KeyValueStore
from engine.wire.messages import GenerateRequest


class AnswerReader:
    """What one HTTP request has to do with an answer."""

    def __init__(self, answer: Answer, known: Position | None):
        """known: what the client already has of its stream."""
        self.created = answer.record.created
        self.ids: EventIds | None = None
        """The ids of a stream's events; None before `read`, and with more than MAX_CHOICES choices."""
        self._answer, self._known = answer, known

    @property
    def started(self) -> bool:
        """The answer is computed, or was: no work is to be refused."""
        return self._answer.started

    def hex_id(self, name: str) -> str:
        """Return 32 hex digits for a part of the answer, the same whenever it is made again."""
        return self._answer.record.hex_id(name)

    def cancel(self) -> None:
        """Stop computing the answer: nobody wants the rest."""
        self._answer.cancel()

    async def read(
        self, frontend: Frontend, prompts: list[list[GenerateRequest]], client: str, fingerprint: str | None
    ) -> TapedGeneration:
        """Raises what Answer.read does, and InvalidParameter for a position of another stream."""
        num_choices = sum(map(len, prompts))
        if num_choices <= MAX_CHOICES or self._known is not None:
            self.ids = EventIds(self._answer.stream_id, num_choices, self._known)
        return await self._answer.read(frontend, prompts, client, fingerprint, self.ids)


class Answers:
    def __init__(self, store: KeyValueStore, ttl_s: float):
        self._store, self._ttl_s = store, ttl_s
        self._live: dict[str, Answer] = {}

    async def open(self, stream_id: str, owner: str, new: Record | None) -> Answer:
        """Return the answer of this id; if there is none, that to `new`, if it is given.

        Raises StreamNotFound, StoreUnavailable, StoredValueCorrupt.
        """
        answer = self._live.get(stream_id) or await self._find(stream_id, new)
        if answer is None or answer.record.owner != owner:
            raise StreamNotFound(stream_id, self._ttl_s, self._store.shared)
        if answer.started:  # if it is complete, only the store keeps it
            return answer
        return self._live.setdefault(stream_id, answer)  # another request may have waited for the store, too

    async def _find(self, stream_id: str, new: Record | None) -> Answer | None:
        stored = await Record.load(self._store, stream_id)
        record = stored or new
        if record is None:
            return None
        return Answer(stream_id, record, self._store, self._ttl_s, self.forget, stored=stored is not None)

    def forget(self, answer: Answer) -> None:
        """From now on the store is asked."""
        if self._live.get(answer.stream_id) is answer:
            del self._live[answer.stream_id]

    async def close(self) -> None:
        """Give up what is computed here."""
        await asyncio.gather(*(answer.close() for answer in list(self._live.values())))
        await self._store.close()
