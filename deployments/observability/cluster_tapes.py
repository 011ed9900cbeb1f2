"""The tapes of all engines and routers of a server."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable

from deployments.observability.telemetry import Telemetry
from deployments.replicas.pools import EnginePool


async def cluster_tapes(pools: Iterable[EnginePool], telemetry: Telemetry) -> bytes:
    """Return the tapes of all engines and routers, as a file of tapes. Their hashes share a key that nobody keeps."""
    from engine.parts.tape.file import pack_tapes  # an ingress starts without it

    key, pools = secrets.token_bytes(16), list(pools)
    found = await asyncio.gather(*(pool.tapes(key) for pool in pools))
    routers = [tape for pool in pools for tape in pool.own_tape(telemetry.stats.ingress_id)]
    routers = [*await telemetry.router_tapes(routers), *(tape for some in found for tape in some.routers)]
    engines = [tape for some in found for tape in some.engines]
    return await asyncio.to_thread(pack_tapes, engines, routers)
