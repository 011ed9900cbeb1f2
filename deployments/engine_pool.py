"""The replicas of one model, as an ingress and a decode replica see them. All Serve calls to them are made here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import msgspec
from ray.exceptions import RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from deployments import ray_compat
from deployments.routing.prompts import PromptReader
from deployments.routing.routed_call import Outcome, RoutedCall
from deployments.routing.stats import RoutingStats
from deployments.tickets import PoolState
from engine.errors import EngineUnavailable, Overloaded, ServingError
from engine.kv_transfer.ticket import PrefillTicket
from engine.messages import EngineJournal, EngineStatus, GenerateRequest

logger = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 3.0


class EnginePool(Protocol):
    async def generate(self, request: GenerateRequest) -> None:
        """Returns when the request has ended in its engine. Cancelling it aborts the request there.

        Waits for a replica if there is none. Raises ServingError; EngineUnavailable if the replica is lost meanwhile.
        """

    async def statuses(self) -> list[EngineStatus]:
        """One per healthy replica. Raises EngineUnavailable if there is none."""

    async def asleep(self) -> bool:
        """Whether there is no replica because nobody needs one: the next request starts one."""

    async def prefill_statuses(self) -> list[EngineStatus]:
        """One per healthy replica of those that compute prompts for these; none where there are no such."""

    async def journals(self, request_ids: list[str]) -> list[EngineJournal]:
        """What all these replicas have noted of these requests; those that do not answer are left out."""


async def found_statuses(pool: EnginePool) -> tuple[list[EngineStatus], list[EngineStatus]]:
    """Of all replicas that answer: those that decode, and those that compute prompts for them."""

    async def decode() -> list[EngineStatus]:
        try:
            return await pool.statuses()
        except EngineUnavailable:
            return []

    return await asyncio.gather(decode(), pool.prefill_statuses())


class ServePool:
    """Replicas of a `Decode` deployment, and of its `Prefill` deployment if it has one."""

    def __init__(
        self,
        handle: DeploymentHandle,
        prefill: DeploymentHandle | None = None,
        block_size: int | None = None,
        may_sleep: bool = False,
        note: Callable[[str, str], None] | None = None,
    ):
        """block_size: of the replicas' KV blocks; None where they share no prefixes. may_sleep: whether there may be no
        replicas while nobody needs one. note: is told by request id where each request is sent; from any thread."""
        self._may_sleep = may_sleep
        self.routing = RoutingStats()
        self._handle, self._prompts = handle, PromptReader(block_size)
        self._note = note
        self._prefill = None if prefill is None else ServePrefillPool(prefill)

    async def generate(self, request: GenerateRequest) -> None:
        prompt = self._prompts.read(request.request_id, request.prompt, request.cache_salt, request.session_id)
        if request.params.prompt_logprobs is not None:
            prompt = replace(prompt, keys=())  # all of it is computed, whatever is cached
        note = None if self._note is None else partial(self._note, request.request_id)
        call = RoutedCall(prompt, self.routing, model=request.model, note=note)
        await _answer(self._handle.generate.remote(msgspec.msgpack.encode(request), call), call)

    async def statuses(self) -> list[EngineStatus]:
        statuses = await _statuses(self._handle)
        if not statuses:
            raise EngineUnavailable("no replica is up and healthy")
        return statuses

    async def asleep(self) -> bool:
        return self._may_sleep and await asyncio.to_thread(ray_compat.is_at_rest, self._handle)

    async def prefill_statuses(self) -> list[EngineStatus]:
        return [] if self._prefill is None else await self._prefill.statuses()

    async def journals(self, request_ids: list[str]) -> list[EngineJournal]:
        handles = [self._handle] if self._prefill is None else [self._handle, self._prefill.handle]
        answers = await asyncio.gather(
            *(ray_compat.broadcast(handle, "journal", STATUS_TIMEOUT_S, request_ids) for handle in handles)
        )
        found = [answer for pool in answers for answer in pool if isinstance(answer, bytes)]
        return [msgspec.msgpack.decode(answer, type=EngineJournal) for answer in found]


class ServePrefillPool:
    """Replicas of a `Prefill` deployment; a TicketTaker."""

    def __init__(self, handle: DeploymentHandle, block_size: int | None = None):
        """block_size: as for ServePool; needed to send tickets only."""
        self.handle, self._prompts = handle, PromptReader(block_size)

    async def prefill(self, ticket: PrefillTicket, avoid: list[str]) -> None:
        call = RoutedCall(self._prompts.read(ticket.handoff_id, ticket.token_ids, ticket.cache_salt), avoid=avoid)
        await _answer(self.handle.prefill.remote(msgspec.msgpack.encode(ticket), call), call)

    async def statuses(self) -> list[EngineStatus]:
        return await _statuses(self.handle)

    async def state(self) -> PoolState:
        return await asyncio.to_thread(ray_compat.pool_state, self.handle)


async def _answer(response: DeploymentResponse, call: RoutedCall) -> None:
    """Raises ServingError. Cancelling it cancels the call."""
    outcome: Outcome = "ended"
    try:
        await response
        outcome = "answered"
    except asyncio.CancelledError:
        response.cancel()
        raise
    except Exception as error:  # Ray's, Serve's or gRPC's: whatever it is, the call is lost
        translated = _translate(error)
        outcome = "lost" if isinstance(translated, EngineUnavailable) else "ended"
        raise translated from error
    finally:
        call.close(outcome)


async def _statuses(handle: DeploymentHandle) -> list[EngineStatus]:
    answers = await ray_compat.broadcast(handle, "status", STATUS_TIMEOUT_S)
    return [msgspec.msgpack.decode(answer, type=EngineStatus) for answer in answers if isinstance(answer, bytes)]


def _translate(error: Exception) -> ServingError:
    if isinstance(error, RayTaskError) and isinstance(error.cause, ServingError):
        return error.cause
    if isinstance(error, ServingError):
        return error
    if isinstance(error, BackPressureError):
        return Overloaded("all replicas are busy and their queues are full")
    if isinstance(error, TaskCancelledError):
        return EngineUnavailable("the replica is shutting down")
    logger.warning("call to a replica failed: %r", error)
    return EngineUnavailable(f"the replica died: {type(error).__name__}")
