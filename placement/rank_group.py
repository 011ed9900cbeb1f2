"""The ranks of one engine, inside the placement group of the replica that starts them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.config import EngineConfig
from engine.errors import EngineUnavailable, ServingError, StartupError
from placement.rank_actor import RankActor, RankReady
from placement.spec import GroupSpec

logger = logging.getLogger(__name__)


class RankGroup:
    """Rank actors, from their start to the first death among them. Owned by the control actor: they die with it."""

    def __init__(self, spec: GroupSpec):
        self._spec = spec
        self._ranks: list[Any] = []  # actor handles

    async def start(self, config: EngineConfig, *, engine_id: str, status_to: str) -> RankReady:
        """Start all ranks and wait until the model is loaded.

        Raises the rank's own StartupError, or EngineUnavailable if a rank died or took too long.
        """
        group = ray.util.get_current_placement_group()
        assert group is not None, "a replica is deployed with the bundles of its GroupSpec"
        actor = ray.remote(RankActor)
        for rank in range(self._spec.num_ranks):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=self._spec.bundle_of(rank))
            self._ranks.append(
                actor.options(
                    num_cpus=self._spec.num_cpus, num_gpus=self._spec.num_gpus, scheduling_strategy=strategy
                ).remote()
            )
        started = [rank.start.remote(config, engine_id, status_to) for rank in self._ranks]
        try:
            async with asyncio.timeout(self._spec.startup_timeout_s):
                ready: list[RankReady] = await asyncio.gather(*started)
        except RayTaskError as error:
            self.kill()
            raise _cause(error) from None
        except RayError as error:
            self.kill()
            raise EngineUnavailable(f"a rank died while it started: {error}") from error
        except TimeoutError:
            self.kill()
            limit = self._spec.startup_timeout_s
            raise EngineUnavailable(f"the ranks were not ready within startup_timeout_s={limit:.0f}") from None
        logger.info("ranks ready engine_id=%s ranks=%d", engine_id, len(self._ranks))
        return ready[0]

    async def run(self) -> str:
        """Let all ranks serve; returns why the first of them ended."""
        running = [asyncio.ensure_future(_ended(rank, number)) for number, rank in enumerate(self._ranks)]
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    def kill(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)


async def _ended(rank: Any, number: int) -> str:
    try:
        await rank.run.remote()
    except RayTaskError as error:
        return f"rank {number} failed: {error}"
    except RayError as error:
        return f"rank {number} died: {error}"
    return f"rank {number} ended"


def _cause(error: RayTaskError) -> ServingError:
    """A rank's own error without the remote traceback, if it is one of ours."""
    if isinstance(error.cause, StartupError):
        return error.cause
    return EngineUnavailable(f"a rank failed while it started: {error}")
