"""Clients with idempotency keys, on the real jobs: each gets its answer once, whichever ingress computes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from msgspec import structs

from deployments.frontend.generation import LiveGeneration
from deployments.jobs.errors import AnswerDiverged, IdempotencyKeyInUse
from deployments.jobs.event_ids import Position, parse_event_id
from deployments.jobs.lease import lease_key
from deployments.jobs.record import JobRecord, job_id_of
from deployments.jobs.source import JobSource
from deployments.quotas.errors import BudgetSpent, QuotaExceeded
from deployments.quotas.quotas import current
from engine.errors import ServingError
from engine.text.text_stream import TextChunk

if TYPE_CHECKING:
    from tests.days.cluster import Cluster, Ingress
    from tests.days.day import Ask
    from tests.days.world import World

AGAIN_S = 0.5  # after which a client connects again
TTL_S = 1e6  # for which answers are kept


class Computation(LiveGeneration):
    """A LiveGeneration of a job, which is recorded."""

    def __init__(self, frontend: Any, prompts: Any, client: str, record: Any, *, resumes: bool):
        super().__init__(frontend, prompts, client, record, resumes=resumes)
        self.key = prompts[0][0].request_id.partition("-")[0]
        self.ingress: Ingress = frontend.channel.ingress
        self.running = self.is_cancelled = False
        self.made_at = self.ingress.cluster.loop.time()
        self.ingress.cluster.computations.append(self)

    async def chunks(self) -> AsyncGenerator[TextChunk]:
        cluster, self.running = self.ingress.cluster, True
        cluster.seen["an answer is computed again"] += sum(each.key == self.key for each in cluster.computations) > 1
        try:
            self._check_that_it_is_due()
            async with aclosing(super().chunks()) as chunks:
                async for chunk in chunks:
                    self._check_that_it_is_due()
                    if self.computed_again:
                        cluster.loop.fail(AssertionError(f"{self.key} is computed by an ingress that has lost it"))
                    yield chunk
        except asyncio.CancelledError:
            self.is_cancelled = True
            cluster.seen["an answer is left to another ingress"] += self.computed_again
            raise
        finally:
            self.running = False

    def _check_that_it_is_due(self) -> None:
        """Check that a key is not computed twice at a time, nor again after its answer was in the store."""
        cluster = self.ingress.cluster
        if self.ingress.is_behind or not self.ingress.up:
            return
        of_key = [each for each in cluster.computations if each.key == self.key and each.ingress.up]
        running = sum(each.running and not each.ingress.is_behind for each in of_key)
        assert running <= 1, f"{self.key} is computed twice at a time"
        is_complete = cluster.redis.is_complete(job_id_of("", self.key))
        assert not is_complete, f"{self.key} is computed again, although it was complete"


class KeyedClient:
    """A client that sends its request until it has the whole answer."""

    def __init__(self, world: World, ask: Ask):
        self._world, self._cluster, self._ask = world, world.cluster, ask
        self._known: Position | None = None
        self._tokens: list[list[int]] = [[] for _ in ask.requests]
        self._texts = ["" for _ in ask.requests]
        self._ended: set[int] = set()
        self._rng = world.rng_of(ask)

    async def live(self) -> None:
        cluster, ask = self._cluster, self._ask
        await asyncio.sleep(ask.at)
        number, patience = ask.ingress, ask.leaves_after
        while True:
            ingress = await cluster.an_ingress(number)
            handler = ingress.handle(self._read(ingress))
            await asyncio.wait([handler], timeout=patience)
            if not handler.done():
                cluster.seen["a client connects again"] += 1
                handler.cancel()
                await asyncio.wait([handler])
            elif handler.cancelled():
                cluster.seen["a client loses its ingress"] += 1
            elif (error := handler.exception()) is None:
                break
            elif not isinstance(error, ServingError):
                raise error
            else:
                cluster.seen[f"key {type(error).__name__}"] += 1
                if isinstance(error, QuotaExceeded | BudgetSpent):
                    assert self._world.is_refusal(ask, error)
                    return
                if isinstance(error, AnswerDiverged):
                    made_at = min(each.made_at for each in cluster.computations if each.key == ask.key)
                    assert cluster.redis.lost_at > made_at, "a client is told of another answer"
                    return
                if not error.retryable:
                    return
            number, patience = self._rng.randrange(100), None
            await asyncio.sleep(AGAIN_S)
        assert len(self._ended) == len(ask.requests), "an answer ends without an end"
        cluster.seen["a key is answered"] += 1

    async def _read(self, ingress: Ingress) -> None:
        """Send the request to an ingress, as IdempotentRoutes handles it, and take what is new of the answer."""
        with current(self._world.quota_of(ingress, self._ask)):
            await self._read_within_limits(ingress)

    async def _read_within_limits(self, ingress: Ingress) -> None:
        ask, job_id = self._ask, job_id_of("", self._ask.key)
        new = JobRecord("", "/", b"", [], 0, f"{self._rng.getrandbits(128):032x}")
        while True:
            job = await ingress.jobs.open(job_id, "", new)
            job.num_requests += 1
            try:
                source = JobSource(job, self._known)
                requests = [
                    structs.replace(
                        request,
                        request_id=f"{ask.key}-{self._rng.getrandbits(32):08x}-{i}",
                        reply_to=ingress.inboxes.address,
                    )
                    for i, request in enumerate(ask.requests)
                ]
                generation = await source.start(ingress.context, [requests], ask.client, "print")
                break
            except IdempotencyKeyInUse:
                self._cluster.seen["a key is in use"] += 1
                ingress.jobs.forget(job)
            finally:
                job.num_requests -= 1
                if not job.started and not job.num_requests:
                    ingress.jobs.forget(job)
        async for chunk in generation.chunks():
            if (line := source.event_ids.next()) is not None:
                _, self._known = parse_event_id(line.decode()[4:-1])
                self._take(chunk, job.record)

    def _take(self, chunk: TextChunk, record: JobRecord) -> None:
        index = chunk.index
        assert index not in self._ended, "a token after the end"
        self._tokens[index] += chunk.token_ids
        self._texts[index] += chunk.text
        request = record.seeded([list(self._ask.requests)])[0][index]
        tokens, text, reason = self._world.alone(record.secret, request)
        assert tokens[: len(self._tokens[index])] == self._tokens[index], "other tokens, or a token twice"
        if chunk.finish_reason is not None:
            self._ended.add(index)
            assert (self._texts[index], chunk.finish_reason) == (text, reason), "an answer ends elsewhere"


def check_jobs(cluster: Cluster) -> None:
    """Check that no lease is left when all jobs have ended, and that nobody pays for what another ingress computed."""
    left = cluster.redis.keys(lease_key(""))
    assert not left, f"leases left: {left}"
    for each in cluster.computations:
        if each.ingress.up and each.is_cancelled:
            assert each.computed_again, f"{each.key} is paid for, although another ingress computed it again"
