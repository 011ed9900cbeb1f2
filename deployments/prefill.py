"""The prefill deployment: replicas that compute prompts for decode replicas."""

from __future__ import annotations

import msgspec

from deployments.replicas.engine_deployment import EngineDeployment
from deployments.routing.routing_context import RoutingContext
from engine.config import EngineConfig
from engine.wire.remote_prefill import RemotePrefillRequest
from placement.spec import GroupSpec


class Prefill(EngineDeployment):
    """KV goes from the ranks straight to those of the decode engine that asked."""

    async def __init__(self, config: EngineConfig, spec: GroupSpec):  # type: ignore[misc]  # Serve awaits it
        async with self._starting():
            await self._start_engine(config, spec)

    async def prefill(self, prefill_request: bytes, _: RoutingContext) -> None:
        """A msgpack RemotePrefillRequest, and what this deployment's router wants to know of it; open until the
        handoff is over, so that a replica that is to stop waits for it."""
        await self._engine.prefill(msgspec.msgpack.decode(prefill_request, type=RemotePrefillRequest))
