"""Base of decode and prefill replicas: a Serve replica that controls one engine."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments import ray_compat
from deployments.drain.orphaned_node import end_orphaned_node
from deployments.replicas.departure import POLL_INTERVAL_S, depart
from deployments.replicas.encoded_request import EncodedRequest
from deployments.replicas.engine_replica import EngineReplica
from deployments.replicas.pools import ReplicaQuestion
from deployments.replicas.rebalancing import rebalance
from deployments.replicas.replica_engines import ReplicaEngines
from deployments.replicas.replica_part import OtherReplicas, ReplicaPart, ReplicaSetup
from deployments.replicas.scaling_report import ReplicaReport
from deployments.replicas.serve_pool import ServePool, ServeRemotePool
from deployments.routing.routing_context import RoutingContext
from engine.config import EngineConfig
from engine.errors import EngineUnavailable, StartupError
from engine.model.checkpoint.identity import identity_of
from engine.model.checkpoint.overlay import engine_folder
from engine.source_digest import numerics_digest
from engine.wire.generate_request import ModelIdentity
from engine.wire.messages import Command, Question
from engine.wire.stats.handoff_stats import PeerPool
from placement.console_log import log_to_console
from placement.rank_actor import EngineTask
from placement.rank_group import RankGroup
from placement.spec import GroupSpec

logger = logging.getLogger(__name__)

TERM_S = 20.0  # for requests to leave after a SIGTERM; hosts that are taken back give 30 s
EXIT_DELAY_S = 0.2  # before the process ends, so that open calls get their answer


def own_handle() -> DeploymentHandle:
    """Return a handle of the deployment to which this replica belongs."""
    own = serve.get_replica_context()
    return serve.get_deployment_handle(own.deployment, own.app_name)


class EngineDeployment:
    """Control actor of one engine, or of several that share experts. Neither tokens nor KV pass through it."""

    _engines: ReplicaEngines[EngineReplica]
    _engine: EngineReplica  # the only engine, or the first
    _parts: Sequence[ReplicaPart]
    _ranks: RankGroup | None = None  # until the constructor starts them
    _commands_to: list[str]  # addresses on which the engines take commands
    _model: ModelIdentity
    _tasks: Sequence[asyncio.Task[None]] = ()
    _departure: asyncio.Task[None] | None = None  # waits for the end, and then lets requests move

    @asynccontextmanager
    async def _starting(self) -> AsyncGenerator[None]:
        """Wrap a constructor: if the replica cannot start, report why and stop what has started."""
        started = time.monotonic()
        try:
            yield
        except StartupError as error:
            self._stop()
            await asyncio.to_thread(ray_compat.end_serve_run, str(error))
            raise
        except EngineUnavailable as error:  # a second attempt may succeed
            self._stop()
            logger.error("replica cannot start: %s", error)
            raise
        logger.info("replica ready startup_s=%.1f", time.monotonic() - started)

    async def _start_engine(
        self,
        config: EngineConfig,
        spec: GroupSpec,
        peers: Mapping[PeerPool, DeploymentHandle],
        parts: Callable[[ReplicaSetup], Sequence[ReplicaPart]],
    ) -> dict[PeerPool, ServeRemotePool]:
        """Start the engines, and return the pools of `peers` once the model is loaded. Raises StartupError or
        EngineUnavailable.

        peers: deployments that can compute prompts or encode images for this one. parts: makes the ends of features.
        """
        pools = {kind: ServeRemotePool(peer, config.shared_block_size, kind) for kind, peer in peers.items()}
        replica = ray_compat.engine_id_of(serve.get_replica_context().replica_id)
        log_to_console(replica, spec.log)
        key = await asyncio.to_thread(ray_compat.cluster_key)
        host, node = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        engines = {
            engine_id: EngineReplica(host, spec.stall_timeout_s, pools, key, node)
            for engine_id in ray_compat.engine_ids(replica, config.data_parallel_size)
        }
        self._engines = ReplicaEngines(engines)
        self._engine = self._engines.all[0]
        self._parts = parts(ReplicaSetup(config=config, engines=self._engines, pools=[*pools.values()]))
        self._ranks = ranks = RankGroup(spec)
        tasks = [EngineTask(engine_id, engine.status_to) for engine_id, engine in engines.items()]
        self._commands_to = await ranks.start(config, replica, tasks, key)
        for engine, address in zip(self._engines.all, self._commands_to, strict=True):
            engine.connect(address)
        self._model = await asyncio.to_thread(lambda: identity_of(engine_folder(config)))
        self._tasks = [asyncio.create_task(engine.run()) for engine in self._engines.all]
        ends = self._exit_with_engine(ranks), end_orphaned_node()
        self._tasks = [*self._tasks, *(asyncio.create_task(end) for end in ends)]
        return pools

    async def prefill(self, request: EncodedRequest, context: RoutingContext) -> None:
        """Run a RemoteRequest, and return when its handoff has ended, so that a stopping replica waits for it. The
        context has only what this deployment's router has added."""
        await self._engines.choose(context.engine).run_request(request)

    async def record_replica_metadata(self) -> dict[str, str]:
        """Return what all routers need to know about this replica (routing/router.py). Serve calls it once."""
        commands_to = " ".join(self._commands_to)
        model = {"weights": self._model.weights, "vocabulary": self._model.vocabulary}
        return {"commands_to": commands_to, **model, "numerics": numerics_digest()}

    async def status(self) -> bytes:
        """Return the newest ReplicaStatus of each engine, in msgpack. Raises EngineUnavailable if one hangs or is
        gone."""
        return msgspec.msgpack.encode(self._engines.statuses())

    async def ask(
        self,
        question: Question | ReplicaQuestion,
        timeout_s: float | None = None,
        context: RoutingContext | None = None,
    ) -> list[bytes]:
        """Return the answers of all engines (EngineControl.ask), or of the parts that have one. context: of a call to
        one replica, for the router. Raises EngineUnavailable."""
        if isinstance(question, Question):
            return await self._engines.ask(question, timeout_s)
        answers = await asyncio.gather(*(part.answer(question) for part in self._parts))
        return [msgspec.msgpack.encode(answer) for answer in answers if answer is not None]

    async def tell(self, command: Command) -> None:
        """Send a command to all engines. Raises EngineUnavailable."""
        self._engines.tell(command)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the numbers of a ReplicaReport. Serve calls it once a second if the model is autoscaled."""
        try:
            return ReplicaReport.of_all(self._engines.statuses()).numbers()
        except EngineUnavailable:
            return {}

    async def check_health(self) -> None:
        """Raise EngineUnavailable if an engine is unhealthy. Serve replaces the replica after three failures."""
        self._engines.check_health()

    async def _exit_with_engine(self, ranks: RankGroup) -> None:
        """End this process when a rank dies, or an engine makes no progress.

        If Serve stopped a hanging replica in an orderly way, it would wait `drain_s` in vain for the replica's
        requests.
        """
        ends = [asyncio.create_task(end) for end in (ranks.run(), self._engines.until_unhealthy())]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        # an error of the watch ends the replica too: else nobody would watch it any more
        [why] = await asyncio.gather(done.pop(), return_exceptions=True)
        reason = str(why)
        logger.error("replica exits, because its engine ended: %s", reason)
        self._engines.fail(reason, ranks.doing)
        ranks.kill()  # those whose `run` failed still live
        # Serve replaces the group at once when the process exits; failing health checks would take much longer
        try:
            await asyncio.gather(*(part.ended(reason) for part in self._parts))
        finally:
            asyncio.get_running_loop().call_later(EXIT_DELAY_S, os._exit, 1)

    def _rebalance(self, slots: int) -> list[Coroutine[Any, Any, None]]:
        """Move requests from each engine to idle ones, of this or other replicas, whenever it is out of KV blocks."""
        statuses = ServeRemotePool(own_handle()).statuses
        return [rebalance(engine, statuses, slots) for engine in self._engines.all]

    async def _leave(self, config: EngineConfig, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Move requests, and what parts keep, to other replicas. goes_on: as for `depart`."""
        leaving: list[Coroutine[Any, Any, None]] = []
        pool = ServePool(own_handle(), block_size=config.shared_block_size)
        host, key = ray.util.get_node_ip_address(), await asyncio.to_thread(ray_compat.cluster_key)
        statuses = self._engines.others(ServeRemotePool(own_handle()).statuses)
        others = OtherReplicas(statuses=statuses, send=pool.generate, model=self._model, host=host, key=key)
        for engine in self._engines.all:
            leaving += [
                depart(engine, statuses, config.max_num_seqs, goes_on),
                *(part.leave(engine, others) for part in self._parts),
            ]
        await asyncio.gather(*leaving)

    async def _depart(self, config: EngineConfig) -> None:
        """Move requests, and what parts keep, to other replicas when Serve or a SIGTERM tells this replica to stop.
        Serve waits until they have left. After a SIGTERM, the process ends once they have left, or after TERM_S."""
        loop, signalled, pipe = asyncio.get_running_loop(), asyncio.Event(), ray_compat.pipe_of_sigterm()

        def on_sigterm() -> None:
            loop.remove_reader(pipe)
            signalled.set()

        loop.add_reader(pipe, on_sigterm)
        while not (signalled.is_set() or ray_compat.is_stopping()):
            await asyncio.sleep(POLL_INTERVAL_S)
        departing = self._leave(config)
        if not signalled.is_set():
            await departing
            return
        logger.warning("replica stops, because it got a SIGTERM")
        for engine in self._engines.all:
            engine.refuse("the replica is about to stop; send the request again")
        with suppress(TimeoutError):
            await asyncio.wait_for(departing, TERM_S)
        loop.call_later(EXIT_DELAY_S, os._exit, 0)
        self._stop()

    async def __del__(self) -> None:
        """Stop the replica. Serve calls it after the last request, when it removes the replica."""
        if self._departure is not None:
            await asyncio.wait([self._departure], timeout=TERM_S)  # what parts keep may still be on its way
        self._stop()

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._ranks is not None:
            self._ranks.kill()
            for part in self._parts:
                part.stopped()
