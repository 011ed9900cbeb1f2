"""Ends a node that drains, once Ray's GCS and all streams are gone.

Ray drains a node until Serve's controller has ended its replicas. If the controller has gone with the head, nobody ends
them: on Kubernetes, the pods of a deleted RayService would wait for up to 11 minutes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import ray

from deployments import ray_compat
from deployments.drain.local_node import LocalNode

logger = logging.getLogger(__name__)

VARIABLE = "MANTA_DRAIN_FOLDER"  # names a folder that exists as soon as the node drains; without it, nobody looks
POLL_S = 1.0
GONE_S = 10.0  # for which the GCS must have been away
CONNECT_S = 2.0


async def end_orphaned_node() -> None:
    """Run in each replica; see `until_orphaned`. Does nothing where VARIABLE is not set."""
    if (folder := os.environ.get(VARIABLE)) is None:
        return
    gcs = ray.get_runtime_context().gcs_address
    node = LocalNode(await asyncio.to_thread(ray_compat.http_port))
    if await until_orphaned(node, Path(folder).exists, ray_compat.open_calls, lambda: answers(gcs)):
        logger.warning("the node ends, since it drains, Ray's GCS is gone, and there is no stream")
        node.end()
    else:
        logger.warning("the replica ends, since the node drains, Ray's GCS is gone, and there is no call")
        os._exit(0)


async def until_orphaned(
    node: LocalNode,
    drains: Callable[[], bool],
    open_calls: Callable[[], int],
    gcs_answers: Callable[[], Awaitable[bool]],
    *,
    poll_s: float = POLL_S,
    gone_s: float = GONE_S,
    now: Callable[[], float] = time.monotonic,
) -> bool:
    """Wait until the node has drained for `gone_s` without a GCS, and without a call of this replica. Then return False
    if this replica should end: there is an older one (with a lower process id). The oldest waits for the others, and
    until no client is connected; then True is returned, for the node to end."""
    needed_at = now()
    while True:
        await asyncio.sleep(poll_s)
        if not drains() or open_calls() or await gcs_answers():
            needed_at = now()
        elif now() - needed_at >= gone_s:
            others = node.replicas() - {os.getpid()}
            if any(other < os.getpid() for other in others):
                return False
            if not others and not node.has_clients():
                return True


async def answers(address: str) -> bool:
    """Return whether something accepts connections at an address, `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), CONNECT_S)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
