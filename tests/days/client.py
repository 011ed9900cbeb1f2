"""Clients without idempotency keys."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from deployments.frontend.first_token import FirstTokenLate
from deployments.frontend.generation import TIMEOUT_GRACE_S, LiveGeneration
from deployments.quotas.quotas import current
from engine.core.request import State
from engine.errors import EngineUnavailable, Overloaded, RequestTimeout, ServingError
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.costs import ReportCost
from tests.days.ingress import Ingress
from tests.days.model import alone
from tests.days.strike import LOSSES

if TYPE_CHECKING:
    from tests.days.day import Ask
    from tests.days.world import World

ABORTED_S = 0.1  # after its client has left, in which its engine hears of that on a day without late messages
ABORTED_STEPS = 4  # in which the request then ends


class Client:
    def __init__(self, world: World, ask: Ask):
        self._world, self._cluster, self._day, self._ask = world, world.cluster, world.day, ask

    async def live(self) -> None:
        ask, cluster = self._ask, self._cluster
        await asyncio.sleep(ask.at)
        ingress = await cluster.an_ingress(ask.ingress)
        name, began = ask.requests[0].request_id, cluster.loop.time()
        requests = [_addressed(request, ingress) for request in ask.requests]
        with_errors: ServingError | None = None
        listening = ingress.handle(self._listen(requests, ingress))
        try:
            await asyncio.wait_for(listening, ask.leaves_after)
            return
        except TimeoutError:
            self._cluster.note(f"client of {name} has left")
            self._cluster.seen["client left"] += 1
            if self._day.is_calm:
                await self._check_that_it_ends({request.request_id for request in requests})
            return
        except asyncio.CancelledError:
            assert not ingress.up, f"{name} is cancelled"
            self._cluster.seen["a client loses its ingress"] += 1
            return
        except ServingError as error:
            with_errors = error
        self._cluster.note(f"{name} ends with {with_errors!r}")
        self._cluster.seen[f"ended {type(with_errors).__name__}"] += 1
        waited = self._cluster.loop.time() - began
        match with_errors:
            case _ if self._world.is_refusal(ask, with_errors):
                return
            case FirstTokenLate():
                assert 0 <= with_errors.limit_s < with_errors.bound_s, f"{name} is refused, but not late"
            case Overloaded():
                assert len(self._day.asks) > self._day.size.max_waiting / 2, f"{name} is refused by an empty queue"
            case RequestTimeout():
                assert waited >= (ask.requests[0].timeout_s or 1e9) * (1 - self._day.size.drift) - 0.01, (
                    f"{name} timed out early, after {waited:.3f} s"
                )
            case EngineUnavailable():
                pass  # checked by _listen
            case _:
                raise AssertionError(f"{name} ended with {with_errors!r}")
        timeout_s = ask.requests[0].timeout_s
        if timeout_s is not None:
            most_s = timeout_s + TIMEOUT_GRACE_S + 1.0 + ask.slow_s + self._day.still_s
            assert waited <= most_s, f"{name} ended late, after {waited:.3f} s"

    async def _check_that_it_ends(self, names: set[str]) -> None:
        """Check that engines stop to compute these requests, once they hear that their client has left."""
        await asyncio.sleep(ABORTED_S)
        for engine in [engine for engine in self._cluster.engines.values() if engine.alive]:
            scheduler = engine.core.scheduler
            until = scheduler.totals.steps + ABORTED_STEPS
            while scheduler.totals.steps < until and scheduler.has_work and engine.alive:
                await asyncio.sleep(0.01)
            for name, request in scheduler.queue.live.items():
                of = request.asked_by.request_id if request.asked_by else name
                left = of.partition(".")[0] in names and request.state not in (State.FINISHED, State.LEASED)
                assert not left, f"{name} is still computed, but its client has left"

    async def _listen(self, requests: list[GenerateRequest], ingress: Ingress) -> None:
        ask = self._ask
        quota = self._world.quota_of(ingress, ask)
        if quota is not None and quota.watches_cost:
            requests = [request.asking(ReportCost()) for request in requests]
        with current(quota):
            generation = LiveGeneration(ingress.context, [requests], ask.client)
        texts, tokens = ["" for _ in requests], [list[int]() for _ in requests]
        ended: dict[int, str] = {}
        expected = [alone(request, self._day.size.max_model_len) for request in requests]
        chunks = generation.chunks()
        try:
            async for chunk in chunks:
                self._world.check_queues()
                assert chunk.index not in ended, "a chunk after the end"
                texts[chunk.index] += chunk.text
                tokens[chunk.index] += chunk.token_ids
                right = expected[chunk.index]
                assert right[1].startswith(texts[chunk.index]), f"{requests[chunk.index].request_id}: another text"
                assert right[0][: len(tokens[chunk.index])] == tokens[chunk.index], "other tokens"
                if chunk.finish_reason is not None:
                    ended[chunk.index] = chunk.finish_reason
                    assert (texts[chunk.index], chunk.finish_reason) == right[1:], "a text ends elsewhere"
                if ask.slow_s:
                    await asyncio.sleep(ask.slow_s)
        except EngineUnavailable:
            replays = max(s.retry.num_replays for s in generation._sequences.values())
            assert replays >= 3, f"{requests[0].request_id} was given up after {replays} replays"
            losses = sum(fault.kind in LOSSES for fault in self._day.faults)
            assert losses > 1, f"{requests[0].request_id} was given up after {losses} losses"
            raise
        finally:
            await chunks.aclose()
        assert len(ended) == len(requests), "a request ended without an end"
        usage = generation.usage
        assert usage.completion_tokens == sum(map(len, tokens)), "a request pays for other tokens than it has got"
        assert usage.cached_tokens <= usage.prompt_tokens, "more tokens of a prompt were cached than it has"
        self._cluster.note(f"{requests[0].request_id} ends: {ended[0]}, {len(tokens[0])} tokens")
        self._cluster.seen["ended well"] += 1


def _addressed(request: GenerateRequest, ingress: Ingress) -> GenerateRequest:
    return msgspec.structs.replace(request, reply_to=ingress.inboxes.address)
