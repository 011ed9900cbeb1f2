"""The decode replicas of one model, as an ingress sees them. All Serve calls to them are made here."""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec
from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from engine.errors import EngineUnavailable, Overloaded, ServingError
from engine.messages import EngineStatus, GenerateRequest

STATUS_TIMEOUT_S = 3.0


class EnginePool(Protocol):
    async def generate(self, request: GenerateRequest) -> None:
        """Returns when the request has ended in its engine. Cancelling it aborts the request there."""

    async def statuses(self) -> list[EngineStatus]:
        """One per healthy replica. Raises EngineUnavailable if there is none."""


class ServePool:
    """Replicas of a `Decode` deployment."""

    def __init__(self, handle: DeploymentHandle):
        self._handle = handle

    async def generate(self, request: GenerateRequest) -> None:
        response = self._handle.generate.remote(msgspec.msgpack.encode(request))
        try:
            await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except (RayError, BackPressureError, DeploymentUnavailableError) as error:
            raise _translate(error) from error

    async def statuses(self) -> list[EngineStatus]:
        answers = self._handle.broadcast("status").results_async(timeout_s=STATUS_TIMEOUT_S, return_exceptions=True)
        try:
            statuses = [msgspec.msgpack.decode(a, type=EngineStatus) for a in await answers if isinstance(a, bytes)]
        except (TimeoutError, RayError, DeploymentUnavailableError) as error:
            raise EngineUnavailable(f"replicas did not answer within {STATUS_TIMEOUT_S:.0f} s") from error
        if not statuses:
            raise EngineUnavailable("no replica is up and healthy")
        return statuses


def _translate(error: Exception) -> ServingError:
    if isinstance(error, RayTaskError) and isinstance(error.cause, ServingError):
        return error.cause
    if isinstance(error, BackPressureError):
        return Overloaded("all replicas are busy and their queues are full")
    if isinstance(error, TaskCancelledError):
        return EngineUnavailable("the replica is shutting down")
    return EngineUnavailable(f"the replica died: {type(error).__name__}")
