"""A node ends only if it drains, has lost the GCS, and has neither a call nor a client."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass, field

import pytest

from deployments.drain.local_node import LocalNode
from deployments.drain.orphaned_node import answers, until_orphaned

OWN = os.getpid()
GONE_S = 10


@dataclass
class Node(LocalNode):
    """An orphan without a stream, unless one of these is changed. It counts how often each replica has looked."""

    drains: bool = True
    calls: int = 0
    gcs: bool = False
    clients: bool = False
    pids: set[int] = field(default_factory=lambda: {OWN})
    looks: int = 0
    away: range = range(0)  # the looks at which the GCS does not answer, if it does otherwise

    def replicas(self) -> set[int]:
        return self.pids

    def has_clients(self) -> bool:
        return self.clients

    def start(self) -> asyncio.Task[bool]:
        async def gcs_answers() -> bool:
            return self.gcs and self.looks not in self.away

        def drains() -> bool:
            self.looks += 1
            return self.drains

        waits = until_orphaned(  # a look takes a second
            self, drains, lambda: self.calls, gcs_answers, poll_s=0.0, gone_s=GONE_S, now=lambda: float(self.looks)
        )
        return asyncio.create_task(waits)

    async def looks_for_long(self) -> None:
        """Wait for many times the time for which the GCS must be away."""
        before = self.looks
        async with asyncio.timeout(30):
            while self.looks < before + 5 * GONE_S:
                await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("reason", "value", "gone"),
    [("drains", False, True), ("calls", 1, 0), ("gcs", True, False), ("clients", True, False)],
)
async def test_a_node_that_is_needed_goes_on_until_it_is_not(reason, value, gone):
    node = Node()
    setattr(node, reason, value)
    waits = node.start()
    await node.looks_for_long()
    assert not waits.done()
    setattr(node, reason, gone)
    assert await waits


async def test_the_oldest_replica_ends_the_node_after_the_others_have_ended():
    node = Node(pids={OWN, OWN + 1})
    waits = node.start()
    await node.looks_for_long()
    assert not waits.done()
    node.pids = {OWN}
    assert await waits


async def test_a_younger_replica_ends_alone_and_does_not_wait_for_clients():
    assert not await Node(pids={OWN, OWN - 1}, clients=True).start()


async def test_a_gcs_that_comes_back_is_waited_for_anew():
    node = Node(gcs=True, away=range(20, 19 + GONE_S))
    waits = node.start()
    await node.looks_for_long()
    assert not waits.done()
    node.gcs = False
    assert await waits


async def test_an_address_answers_as_long_as_something_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert await answers(address)
    assert not await answers(address)
    assert not await answers("no-such-host.invalid:6379")
