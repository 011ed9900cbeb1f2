"""Deployment of replicas that change roles: each answers requests or computes prompts for the others."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments import ray_compat
from deployments.decode import Decode
from deployments.parts.table import replica_parts
from deployments.replicas.engine_deployment import own_handle
from deployments.replicas.role_follower import RoleFollower
from engine.config import EngineConfig
from engine.wire.stats.handoff_stats import PeerPool, Role
from placement.spec import GroupSpec


class PrefillDecode(Decode):
    """Its replicas send prompts to the replicas whose role is `prefill`. Roles come from the autoscaling policy, by a
    table in Ray's GCS."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: EngineConfig, spec: GroupSpec, peers: dict[PeerPool, DeploymentHandle]
    ):
        """peers: deployments that can encode images for this one."""
        async with self._starting():
            await self._start_engine(config, spec, {**peers, "prefill": own_handle()}, replica_parts)
            await asyncio.to_thread(ray_compat.remember_that_a_model_is_up)
        self._move_requests(config)
        moves = config.handoff is not None and config.handoff.move_requests
        follower = RoleFollower(self._engines, self._read_role, partial(self._leave, config) if moves else None)
        self._tasks = [*self._tasks, asyncio.create_task(follower.run())]

    async def _read_role(self) -> Role | None:
        """Return the role that the policy has chosen; None if it has chosen none, or if the table is lost."""
        own = serve.get_replica_context()
        table = await asyncio.to_thread(ray_compat.shared, ray_compat.roles_of(own.app_name, own.deployment))
        roles = {} if table is None else msgspec.msgpack.decode(table, type=dict[str, Role])
        return roles.get(ray_compat.engine_id_of(own.replica_id))
