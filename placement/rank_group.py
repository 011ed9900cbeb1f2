"""Ranks of one engine, in the placement group of the replica that starts them."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.black_box import Found, box_path, ended_key, find, remove, trace
from engine.config import EngineConfig
from engine.distributed.cluster_key import ClusterKey
from engine.errors import EngineUnavailable, ServingError, StartupError
from engine.source_digest import engine_version
from placement.cuda_device import rank_options
from placement.rank_actor import EngineTask, RankActor, RankReady, RankTask
from placement.rank_order import meeting_host, rank_order
from placement.spec import GroupSpec

logger = logging.getLogger(__name__)

VERDICT_S = 1.0  # wait after a rank's failure for others to fail, too: another rank may know the reason better
RELAYED = re.compile(r"rank \d+( cannot be reached|: )")  # matches errors about another rank's failure


class RankGroup:
    """The rank actors of a replica, from their start until one of them dies. The control actor owns them, so they die
    with it."""

    def __init__(self, spec: GroupSpec):
        self._spec = spec
        self._ranks: list[Any] = []  # actor handles, by bundle until the ranks' order is known, then by rank
        self._width = 1  # ranks of each engine
        self._running: dict[asyncio.Future[str | None], int] = {}  # numbers of ranks that serve
        self._replica = ""
        self._failed: set[int] = set()  # numbers of ranks that an exception of their own has ended
        self._died: set[int] = set()  # numbers of ranks whose process has ended

    async def start(
        self, config: EngineConfig, replica: str, engines: Sequence[EngineTask], key: ClusterKey
    ) -> list[str]:
        """Start all ranks and wait until the model is loaded. Returns the address at which each engine takes commands.
        replica: its name in logs.

        Raises the StartupError of the rank that failed, or EngineUnavailable if one died or took too long.
        """
        try:
            return await self._start(config, replica, engines, key)
        except BaseException:
            self.kill()
            raise

    async def run(self) -> str:
        """Let all ranks serve. Returns why the first of them ended."""
        ends = {number: self._ended(rank, number) for number, rank in enumerate(self._ranks)}
        self._running = {asyncio.ensure_future(end): number for number, end in ends.items()}
        try:
            done, others = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            reasons = [reason for ended in done if (reason := ended.result())]
            if not reasons and others:  # a rank that ended in an orderly way was told to by one that knows why
                told, _ = await asyncio.wait(others, timeout=VERDICT_S, return_when=asyncio.FIRST_COMPLETED)
                reasons = [reason for ended in told if (reason := ended.result())]
            return reasons[0] if reasons else "its ranks ended"
        finally:
            for ended in self._running:
                ended.cancel()

    def doing(self, engine: int, hangs: bool = False) -> list[str]:
        """Return what the ranks of an engine were doing, if it has ended by itself or hangs: a fatal signal or an
        exception of its own. Return nothing if a rank of this replica was killed or stopped from outside, which may end
        others too, or if one is on another machine, of which nobody knows."""
        found = {number: find(box_path(self._replica, number)) for number in self._running.values()}
        boxes = {number: box for number, box in found.items() if box is not None}
        if len(boxes) < len(found) or any(self._from_outside(number, box) for number, box in boxes.items()):
            return []
        own = {number: box for number, box in boxes.items() if number // self._width == engine}
        if not (hangs or own.keys() & self._failed or any(box.is_fatal for box in own.values())):
            return []
        for number in own:
            if lines := trace(box_path(self._replica, number)):
                logger.error("rank %d died of a fatal signal:\n%s", number, lines)
        return [ended_key(f"{self._replica}.{engine}"), *(key for box in own.values() for key in box.doing)]

    def _from_outside(self, number: int, box: Found) -> bool:
        has_ended = box.life == "dead" or number in self._died
        return box.life == "stopped" or (has_ended and not box.is_fatal and number not in self._failed)

    def kill(self) -> None:
        """End the ranks' processes, even those that hang."""
        for number, rank in enumerate(self._ranks):
            ray.kill(rank)
            remove(box_path(self._replica, number))

    async def _start(
        self, config: EngineConfig, replica: str, engines: Sequence[EngineTask], key: ClusterKey
    ) -> list[str]:
        deadline = time.monotonic() + self._spec.startup_timeout_s
        self._replica, self._width, self._ranks = replica, config.num_ranks, self._create()
        locations = await self._all([rank.location.remote() for rank in self._ranks], deadline)
        order = rank_order(locations, ray.get_runtime_context().get_node_id())
        self._ranks = [self._ranks[bundle] for bundle in order]
        # as one line, because Ray shows only one of several processes' lines that differ only in numbers
        logger.info("ranks placed %s", "; ".join(f"rank {rank}: {locations[b]}" for rank, b in enumerate(order)))
        check_versions(engine_version(), await self._all([rank.version.remote() for rank in self._ranks], deadline))
        task = RankTask(config, replica, engines, self._spec.startup_timeout_s, self._spec.log, key)
        rank_0 = ""
        if len(order) > 1:
            host = meeting_host([locations[bundle].host for bundle in order])
            (rank_0,) = await self._all([self._ranks[0].listen.remote(task, host)], deadline)
        started = [actor.start.remote(task, rank, rank_0) for rank, actor in enumerate(self._ranks)]
        ready: list[RankReady | None] = await self._all(started, deadline)
        logger.info("ranks ready engine_id=%s ranks=%d", replica, len(self._ranks))
        return [leader.address for leader in ready if leader is not None]

    def _create(self) -> list[Any]:
        """Create one actor per bundle."""
        group = ray.util.get_current_placement_group()
        assert group is not None, "a replica must be deployed with the bundles of its GroupSpec"
        actor = ray.remote(RankActor)
        return [
            actor.options(
                **rank_options(self._spec), scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle)
            ).remote()
            for bundle in range(self._spec.num_ranks)
        ]

    async def _ended(self, rank: Any, number: int) -> str | None:
        """Wait until the rank ends, and return the reason; None after an orderly end. The reason is short because
        clients read it."""
        try:
            await rank.run.remote()
        except RayTaskError as error:
            if isinstance(error.cause, ServingError):
                return str(error.cause)
            self._failed.add(number)
            logger.error("rank failed rank=%d: %s", number, error)
            return f"rank {number} failed: {error.cause}"
        except RayError as error:
            self._died.add(number)
            logger.error("rank died rank=%d: %s", number, error)
            return f"rank {number} died"
        return None

    async def _all(self, calls: Sequence[Awaitable[Any]], deadline: float) -> list[Any]:
        """Return the answers to the calls, in the order of `self._ranks`."""
        waiting = [asyncio.ensure_future(call) for call in calls]
        try:
            done, late = await asyncio.wait(
                waiting, timeout=deadline - time.monotonic(), return_when=asyncio.FIRST_EXCEPTION
            )
            if any(call.exception() for call in done):
                await asyncio.wait(waiting, timeout=VERDICT_S)
                raise _verdict([call.exception() if call.done() else None for call in waiting]) from None
            if late:
                limit = f"startup_timeout_s={self._spec.startup_timeout_s:.0f}"
                ranks = ", ".join(str(rank) for rank, call in enumerate(waiting) if call in late)
                raise EngineUnavailable(f"not ready within {limit}: rank {ranks} of {len(waiting)}")
            return [call.result() for call in waiting]
        finally:
            for call in waiting:
                call.cancel()  # their results are not needed


def check_versions(own: str, of_ranks: Sequence[str]) -> None:
    """Raise StartupError unless all ranks have the version of their replica: what they send each other changes with any
    version. of_ranks: in rank order."""
    for rank, version in enumerate(of_ranks):
        if version != own:
            raise StartupError(
                f"the ranks of an engine must be of one version: rank {rank} is {version}, its replica {own}"
            )


def _verdict(errors: Sequence[BaseException | None]) -> ServingError:
    """Return the error to report after ranks failed to start. errors: one per rank, in rank order.

    A rank's death is never caused by another rank, so it takes precedence; then a rank's own error; then errors about
    other ranks.
    """
    deaths: list[ServingError] = []
    own: list[ServingError] = []
    relayed: list[ServingError] = []
    for rank, error in enumerate(errors):
        if error is None:
            continue
        cause = getattr(error, "cause", None)
        if not isinstance(error, RayTaskError):
            deaths.append(EngineUnavailable(f"rank {rank} died while it started: {error}"))
        elif not isinstance(cause, StartupError):
            own.append(EngineUnavailable(f"rank {rank} failed while it started: {error}"))
        elif RELAYED.match(str(cause)):
            relayed.append(cause)
        else:
            own.append(cause)
    return [*deaths, *own, *relayed][0]
