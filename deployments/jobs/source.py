"""Sources of the tokens for a request: generated live, or read from a job."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from typing import Protocol
from weakref import WeakSet

from deployments.frontend.generation import LiveGeneration
from deployments.frontend.sequence import RequestUsage
from deployments.frontend.sequence_context import SequenceContext
from deployments.jobs.event_ids import MAX_CHOICES, EventIds, NoEventIds, Position
from deployments.jobs.job import Job
from deployments.jobs.record import JobRecord
from deployments.served_adapter import ServedAdapter
from engine.text.text_stream import TextChunk
from engine.wire.generate_request import GenerateRequest


class Generation(Protocol):
    """All sequences of one HTTP request. It runs once, through `chunks`."""

    prompts: list[list[int]]
    usage: RequestUsage
    """Tokens so far."""

    def chunks(self) -> AsyncGenerator[TextChunk]: ...


class GenerationSource(Protocol):
    """Starts the generation of one HTTP request, and provides the ids and the time of its answer."""

    @property
    def created(self) -> int:
        """Seconds since 1970."""

    @property
    def started(self) -> bool:
        """Whether the answer exists or is being computed."""

    @property
    def admitted(self) -> bool:
        """Whether an ingress has begun the answer, so that it needs no admission."""

    @property
    def adapter(self) -> ServedAdapter | None:
        """Adapter with which the answer was begun; None if it was begun without one, or has not begun."""

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the model with which the answer was begun; None if it has not begun, or is not kept."""

    @property
    def job_id(self) -> str | None:
        """Id by which the answer's job can be found later; None if the answer is not kept."""

    @property
    def event_ids(self) -> NoEventIds:
        """Ids of a stream's events, valid after `start`."""

    def hex_id(self, name: str) -> str:
        """Return a 32-digit hexadecimal id for a part of the answer."""

    async def start(
        self, frontend: SequenceContext, prompts: list[list[GenerateRequest]], client: str, fingerprint: str | None
    ) -> Generation:
        """Start the generation. prompts: for each prompt, the requests of its sequences. fingerprint: fingerprint of
        the model that would compute it."""


class LiveSource:
    """Source of an answer that is not kept."""

    started, admitted, adapter, fingerprint, job_id = False, False, None, None, None
    event_ids = NoEventIds()

    def __init__(self) -> None:
        self.created = int(time.time())

    def hex_id(self, name: str) -> str:
        return secrets.token_hex(16)

    async def start(
        self, frontend: SequenceContext, prompts: list[list[GenerateRequest]], client: str, fingerprint: str | None
    ) -> Generation:
        return self.part(frontend, prompts, client)

    def part(self, frontend: SequenceContext, prompts: list[list[GenerateRequest]], client: str) -> LiveGeneration:
        """Return the generation of a part of the answer, which is computed in parts."""
        return LiveGeneration(frontend, prompts, client)


class DerivedSource(LiveSource):
    """Source of an answer that is not kept, but is the same whenever it is computed, because ids, time and seeds come
    from the record of its request."""

    def __init__(self, record: JobRecord):
        self.created, self._record = record.created, record
        self._running = WeakSet[LiveGeneration]()

    def hex_id(self, name: str) -> str:
        return self._record.hex_id(name)

    async def start(
        self, frontend: SequenceContext, prompts: list[list[GenerateRequest]], client: str, fingerprint: str | None
    ) -> Generation:
        return self.part(frontend, self._record.seeded(prompts), client)

    def part(self, frontend: SequenceContext, prompts: list[list[GenerateRequest]], client: str) -> LiveGeneration:
        generation = super().part(frontend, prompts, client)
        self._running.add(generation)
        return generation

    def leave(self) -> None:
        """Let another ingress compute the answer as if nothing had been computed here. Call it before the request is
        cancelled. A part of it that has ended stays billed."""
        for generation in self._running:
            generation.computed_again = generation.charged_again = True


class JobSource:
    """Source of a job's answer: computed once, with ids that are the same for every reader."""

    def __init__(self, job: Job, known: Position | None = None):
        """known: position up to which the client already has the stream."""
        self.created, self.job_id = job.record.created, job.job_id
        self.event_ids: NoEventIds = NoEventIds()
        """No ids if there are more than MAX_CHOICES choices."""
        self._job, self._known = job, known

    @property
    def started(self) -> bool:
        return self._job.started

    @property
    def admitted(self) -> bool:
        return self._job.begun

    @property
    def adapter(self) -> ServedAdapter | None:
        return self._job.record.adapter

    @property
    def fingerprint(self) -> str | None:
        return self._job.record.fingerprint

    def hex_id(self, name: str) -> str:
        return self._job.record.hex_id(name)

    async def start(
        self, frontend: SequenceContext, prompts: list[list[GenerateRequest]], client: str, fingerprint: str | None
    ) -> Generation:
        """Start or join the generation. Raises the errors of Job.read, and InvalidParameter for a position of another
        stream."""
        num_choices = sum(map(len, prompts))
        if num_choices <= MAX_CHOICES or self._known is not None:
            self.event_ids = EventIds(self._job.job_id, num_choices, self._known)
        return await self._job.read(frontend, prompts, client, fingerprint, self.event_ids)
