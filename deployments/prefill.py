"""Prefill and encode deployments: replicas that compute prompts or images for others. KV goes directly from rank to
rank."""

from __future__ import annotations

from ray.serve.handle import DeploymentHandle

from deployments.parts.table import replica_parts
from deployments.replicas.engine_deployment import EngineDeployment
from engine.config import EngineConfig
from engine.wire.stats.handoff_stats import PeerPool
from placement.spec import GroupSpec


class Prefill(EngineDeployment):
    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: EngineConfig, spec: GroupSpec, peers: dict[PeerPool, DeploymentHandle]
    ):
        """peers: deployments that can encode images for this one."""
        async with self._starting():
            await self._start_engine(config, spec, peers, replica_parts)
