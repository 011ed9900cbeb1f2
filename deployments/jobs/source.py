"""Where the tokens of a request come from."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from typing import Protocol

from deployments.frontend.generation import LiveGeneration
from deployments.frontend.sequence import SequenceContext, Usage
from deployments.jobs.event_ids import MAX_CHOICES, EventIds, NoEventIds, Position
from deployments.jobs.job import Job
from deployments.jobs.record import JobRecord
from engine.text.text_stream import TextChunk
from engine.wire.messages import GenerateRequest


class Generation(Protocol):
    """All sequences of one HTTP request. It runs once, through `chunks`."""

    prompts: list[list[int]]
    usage: Usage
    """Tokens so far."""

    def chunks(self) -> AsyncGenerator[TextChunk]: ...


class GenerationSource(Protocol):
    """Starts the generation of one HTTP request, and has what else belongs to its answer."""

    @property
    def created(self) -> int:
        """Seconds since 1970."""
        ...

    @property
    def started(self) -> bool:
        """Return whether nothing is left to be admitted."""
        ...

    @property
    def job_id(self) -> str | None:
        """The id of the job by which the answer is found again; None if nothing is kept."""
        ...

    @property
    def event_ids(self) -> NoEventIds:
        """The ids of the events of a stream, from `start` on."""
        ...

    def hex_id(self, name: str) -> str:
        """Return 32 hex digits for a part of the answer."""
        ...

    async def start(
        self, frontend: SequenceContext, prompts: list[list[GenerateRequest]], client: str, fingerprint: str | None
    ) -> Generation:
        """prompts: for each prompt the requests of its sequences. fingerprint: of the model that would compute it."""
        ...


class LiveSource:
    """An answer of which nothing is kept."""

    started, job_id = False, None
    event_ids = NoEventIds()

    def __init__(self) -> None:
        self.created = int(time.time())

    def hex_id(self, name: str) -> str:
        return secrets.token_hex(16)

    async def start(
        self, frontend: SequenceContext, prompts: list[list[GenerateRequest]], client: str, fingerprint: str | None
    ) -> Generation:
        return LiveGeneration(frontend, prompts, client)


class DerivedSource(LiveSource):
    """An answer of which nothing is kept, and which is the same whenever it is computed: what would differ follows
    from the record of its request."""

    def __init__(self, record: JobRecord):
        self.created, self._record = record.created, record

    def hex_id(self, name: str) -> str:
        return self._record.hex_id(name)

    async def start(
        self, frontend: SequenceContext, prompts: list[list[GenerateRequest]], client: str, fingerprint: str | None
    ) -> Generation:
        return LiveGeneration(frontend, self._record.seeded(prompts), client)


class JobSource:
    """The answer of a job, which is computed once, and whose parts are the same whenever it is asked for."""

    def __init__(self, job: Job, known: Position | None = None):
        """known: what the client already has of its stream."""
        self.created, self.job_id = job.record.created, job.job_id
        self.event_ids: NoEventIds = NoEventIds()
        """Without ids if there are more than MAX_CHOICES choices."""
        self._job, self._known = job, known

    @property
    def started(self) -> bool:
        return self._job.started

    def hex_id(self, name: str) -> str:
        return self._job.record.hex_id(name)

    async def start(
        self, frontend: SequenceContext, prompts: list[list[GenerateRequest]], client: str, fingerprint: str | None
    ) -> Generation:
        """Raises what Job.read does, and InvalidParameter for a position of another stream."""
        num_choices = sum(map(len, prompts))
        if num_choices <= MAX_CHOICES or self._known is not None:
            self.event_ids = EventIds(self._job.job_id, num_choices, self._known)
        return await self._job.read(frontend, prompts, client, fingerprint, self.event_ids)
