"""The tapes of all engines and routers of a server."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Sequence

from deployments.observability.telemetry import Telemetry
from deployments.parts.tape.choice_log import ChoiceLog
from deployments.parts.tape.questions import TIMEOUT_S, KeptTape, ListKeptTapes, PoolTapes, ReadKeptTape, TakeTapes
from deployments.replicas.pools import EnginePool

ROUTER_TAPES = "router_tapes"


class ClusterTapes:
    def __init__(self, pools: Collection[EnginePool], choices: Sequence[ChoiceLog], telemetry: Telemetry):
        """choices: of this ingress's routers."""
        self._pools, self._choices, self._telemetry = pools, choices, telemetry
        telemetry.reports[ROUTER_TAPES] = self._of_own_routers

    async def take(self) -> bytes:
        """Return the tapes of all engines and routers, as a file of tapes. Their hashes share a key that nobody
        keeps."""
        from engine.parts.tape.file import pack_tapes  # an ingress starts without it

        key, own = secrets.token_bytes(16), self._telemetry.stats.ingress_id
        found = await asyncio.gather(*(pool.ask(TakeTapes(key), PoolTapes, TIMEOUT_S) for pool in self._pools))
        tapes = [each for some in found for each in some]
        others = await self._telemetry.peers.ask(ROUTER_TAPES, list[bytes], own)
        routers = [*self._of_own_routers(""), *(tape for some in others for tape in some)]
        routers += [tape for each in tapes for tape in each.routers]
        engines = [tape for each in tapes for tape in each.engines]
        return await asyncio.to_thread(pack_tapes, engines, routers)

    def _of_own_routers(self, but: str) -> list[bytes]:
        """Return the tapes of this ingress's routers, unless it has this id."""
        own = self._telemetry.stats.ingress_id
        return [] if own == but else [tape for log in self._choices for tape in log.take(own)]

    async def kept(self) -> list[KeptTape]:
        """Return the files of kept tapes on the machines of all replicas: this server's own, then others, the newest
        first."""
        asked = (pool.ask(ListKeptTapes(), list[KeptTape], TIMEOUT_S) for pool in self._pools)
        listed = [each for of_pool in await asyncio.gather(*asked) for some in of_pool for each in some]
        listed.sort(key=lambda each: each.own)  # of a file that several list, since each knows only its own deployment
        return sorted({each.name: each for each in listed}.values(), key=lambda each: (not each.own, -each.written_at))

    async def read(self, name: str) -> bytes:
        """Return the content of such a file; empty if there is none with this name."""
        found = await asyncio.gather(*(pool.ask(ReadKeptTape(name), bytes, TIMEOUT_S) for pool in self._pools))
        return max((content for of_pool in found for content in of_pool), key=len, default=b"")
