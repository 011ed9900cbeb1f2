"""The replicas of one model, as an ingress and a decode replica see them. All Serve calls to them are made here."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import msgspec
from ray.exceptions import RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from deployments import ray_compat
from deployments.tickets import PoolState
from engine.errors import EngineUnavailable, Overloaded, ServingError
from engine.kv_transfer.ticket import PrefillTicket
from engine.messages import EngineStatus, GenerateRequest

logger = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 3.0


class EnginePool(Protocol):
    async def generate(self, request: GenerateRequest) -> None:
        """Returns when the request has ended in its engine. Cancelling it aborts the request there.

        Waits for a replica if there is none. Raises ServingError; EngineUnavailable if the replica is lost meanwhile.
        """

    async def statuses(self) -> list[EngineStatus]:
        """One per healthy replica. Raises EngineUnavailable if there is none."""

    async def prefill_statuses(self) -> list[EngineStatus]:
        """One per healthy replica of those that compute prompts for these; none where there are no such."""


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

    def __init__(self, handle: DeploymentHandle, prefill: DeploymentHandle | None = None):
        self._handle = handle
        self._prefill = None if prefill is None else ServePrefillPool(prefill)

    async def generate(self, request: GenerateRequest) -> None:
        await _answer(self._handle.generate.remote(msgspec.msgpack.encode(request)))

    async def statuses(self) -> list[EngineStatus]:
        statuses = await _statuses(self._handle)
        if not statuses:
            raise EngineUnavailable("no replica is up and healthy")
        return statuses

    async def prefill_statuses(self) -> list[EngineStatus]:
        return [] if self._prefill is None else await self._prefill.statuses()


class ServePrefillPool:
    """Replicas of a `Prefill` deployment; a TicketTaker."""

    def __init__(self, handle: DeploymentHandle):
        self._handle = handle

    async def prefill(self, ticket: PrefillTicket, avoid: list[str]) -> None:
        await _answer(self._handle.prefill.remote(msgspec.msgpack.encode(ticket), avoid))

    async def statuses(self) -> list[EngineStatus]:
        return await _statuses(self._handle)

    async def state(self) -> PoolState:
        return await asyncio.to_thread(ray_compat.pool_state, self._handle)


async def _answer(response: DeploymentResponse) -> None:
    """Raises ServingError. Cancelling it cancels the call."""
    try:
        await response
    except asyncio.CancelledError:
        response.cancel()
        raise
    except Exception as error:  # Ray's, Serve's or gRPC's: whatever it is, the call is lost
        raise _translate(error) from error


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
