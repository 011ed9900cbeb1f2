"""Makes a starting decode replica wait for a prefill engine that fits it. Independent of Ray."""

from __future__ import annotations

import asyncio
import logging

from deployments.replicas.engine_control import EngineControl
from deployments.replicas.remote_dispatcher import RemotePool
from engine.errors import EngineUnavailable, StartupError
from engine.wire.messages import EngineStatus

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.2


async def pair(engine: EngineControl, pool: RemotePool, timeout_s: float) -> None:
    """Wait until a prefill engine with the fingerprint of `engine` is up.

    If the prefill pool was up once and is down now, or is scaled to zero, the replica starts without it and computes
    prompts itself. Raises StartupError after `timeout_s`, or if the prefill engines run another model or another KV
    layout; the error names both engines and the difference.
    """
    try:
        async with asyncio.timeout(timeout_s):
            partner = await _find(engine, pool)
    except TimeoutError:
        raise StartupError(f"no prefill replica came up within startup_timeout_s={timeout_s:.0f}") from None
    if partner is None:
        logger.warning("no prefill replica is up; until one is, this engine computes all prompts itself")
    else:
        logger.info("prefill engine %s fits this decode engine", partner.engine_id)


async def _find(engine: EngineControl, pool: RemotePool) -> EngineStatus | None:
    while True:
        state = await pool.state()  # asked first: once it is not deploying, the statuses that follow are complete
        try:
            own = engine.status()
        except EngineUnavailable:  # it has just started
            await asyncio.sleep(POLL_INTERVAL_S)
            continue
        found = await pool.statuses()
        fitting = [status for status in found if status.fingerprint == own.fingerprint]
        if fitting:
            return fitting[0]
        if found and state != "deploying":
            raise StartupError(mismatch(own, found[0]))
        if not found and state == "down":
            return None
        await asyncio.sleep(POLL_INTERVAL_S)


def mismatch(decode: EngineStatus, prefill: EngineStatus) -> str:
    """Return a message about the `name=value` parts in which two fingerprints differ."""
    theirs, ours = prefill.fingerprint.split(), decode.fingerprint.split()
    has = ", ".join(part for part in theirs if part not in ours) or "less"
    needs = ", ".join(part for part in ours if part not in theirs) or "nothing"
    return f"{prefill.engine_id} cannot compute prompts for {decode.engine_id}: it has {has}, where {needs} is needed"
