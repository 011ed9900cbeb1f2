"""Prefill and encode deployments: replicas that compute prompts or images for others. KV goes directly from rank to
rank."""

from __future__ import annotations

from ray.serve.handle import DeploymentHandle

from deployments.replicas.encoded_request import EncodedRequest
from deployments.replicas.engine_deployment import EngineDeployment
from deployments.replicas.serve_pool import ServeRemotePool
from deployments.routing.routing_context import RoutingContext
from engine.config import EngineConfig
from engine.wire.messages import PeerPool
from placement.spec import GroupSpec


class Prefill(EngineDeployment):
    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: EngineConfig, spec: GroupSpec, peers: dict[PeerPool, DeploymentHandle]
    ):
        """peers: deployments that can encode images for this one."""
        size, tape_mib = config.shared_block_size, config.tape_mib
        pools = {kind: ServeRemotePool(peer, size, kind, tape_mib) for kind, peer in peers.items()}
        async with self._starting():
            await self._start_engine(config, spec, pools)

    async def prefill(self, request: EncodedRequest, context: RoutingContext) -> None:
        """Run a RemoteRequest, and return when its handoff has ended, so that a stopping replica waits for it.

        The context has only what this deployment's router has added.
        """
        await self._engines.choose(context.engine).run_request(request)
