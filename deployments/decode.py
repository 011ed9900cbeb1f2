"""Decode deployment: replicas that answer requests. Tokens go from the engine directly to the ingress."""

from __future__ import annotations

import asyncio

from ray.serve.handle import DeploymentHandle

from deployments import ray_compat
from deployments.parts.table import replica_parts
from deployments.replicas.encoded_request import EncodedRequest
from deployments.replicas.engine_deployment import EngineDeployment
from deployments.replicas.pairing import pair
from deployments.routing.routing_context import RoutingContext
from engine.config import EngineConfig
from engine.errors import OtherModel
from engine.wire.stats.handoff_stats import PeerPool
from placement.spec import GroupSpec


class Decode(EngineDeployment):
    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: EngineConfig, spec: GroupSpec, peers: dict[PeerPool, DeploymentHandle]
    ):
        """peers: deployments that can compute prompts or encode images for this one."""
        async with self._starting():
            pools = await self._start_engine(config, spec, peers, replica_parts)
            if "prefill" in pools:
                limit_s = spec.startup_timeout_s
                await asyncio.gather(*(pair(engine, pools["prefill"], limit_s) for engine in self._engines.all))
            await asyncio.to_thread(ray_compat.remember_that_a_model_is_up)
        self._move_requests(config)

    def _move_requests(self, config: EngineConfig) -> None:
        """Let requests move from here to other replicas, if the configuration says so."""
        if config.handoff is not None and config.handoff.move_requests:
            self._departure = asyncio.create_task(self._depart(config))
            moves = [asyncio.create_task(move) for move in self._rebalance(config.max_num_seqs)]
            self._tasks = [*self._tasks, self._departure, *moves]

    async def generate(self, requests: list[EncodedRequest], context: RoutingContext) -> None:
        """Run GenerateRequests in the engine, and return when they have ended. The context has only what this
        deployment's router has added. Raises OtherModel, and the errors of EngineReplica.run_requests."""
        for request in requests:
            if request.model not in (None, self._model):
                raise OtherModel(request.request_id, self._model.weights, self._model.vocabulary)
        if context.holder is not None:
            requests = [request.with_holder(context.holder) for request in requests]
        await self._engines.choose(context.engine).run_requests(requests)
