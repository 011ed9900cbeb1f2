"""What a new replica fetches before it takes requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec
import pytest

from deployments.replicas import warm_start as module
from deployments.replicas.encoded_request import EncodedRequest
from deployments.replicas.pools import ReplicaStatus
from deployments.replicas.warm_start import choose, warm_start
from engine.errors import EngineUnavailable
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import Add, EngineStatus
from engine.wire.parts.kv_fetching import HotPrefix, HotPrefixes, KVHolder
from engine.wire.remote_request import Peer
from tests.engine_stats import engine_stats

A, B = (Peer(name, f"tcp://{name}", 1) for name in "ab")
PLENTY = 10**9


def prefix(first: int, length: int, uses: int, salt: str = "") -> HotPrefix:
    """A byte per token."""
    return HotPrefix([first, *range(1, length)], salt, uses, length)


def told(peer: Peer, *prefixes: HotPrefix) -> HotPrefixes:
    return HotPrefixes(peer, list(prefixes))


def lengths(found: Sequence[tuple[HotPrefix, Peer]]) -> list[int]:
    return [len(prefix.token_ids) for prefix, _ in found]


def test_the_most_used_prefixes_of_all_peers_together_come_first():
    found = choose([told(A, prefix(1, 40, 5), prefix(2, 50, 4)), told(B, prefix(2, 50, 3))], PLENTY, PLENTY)
    assert lengths(found) == [50, 40]
    assert found[0][1] == B and found[1][1] == A, "each with a peer that has it"


@pytest.mark.parametrize("bounds", [(100, PLENTY), (PLENTY, 100)])
def test_a_prefix_that_exceeds_a_bound_is_left_out_and_smaller_ones_follow(bounds):
    found = choose([told(A, prefix(1, 60, 3), prefix(2, 50, 2), prefix(3, 40, 1))], *bounds)
    assert lengths(found) == [60, 40]


def test_what_two_prefixes_share_counts_once():
    longer, shorter = prefix(1, 90, 3), prefix(1, 60, 2)
    assert lengths(choose([told(A, shorter, longer)], 90, PLENTY)) == [90, 60]
    other_client = prefix(1, 60, 2, salt="other")
    assert lengths(choose([told(A, other_client, longer)], 90, PLENTY)) == [90]


class Engine:
    """reports: how often it is asked before it has reported."""

    def __init__(self, reports: int = 0, fails: bool = False, hangs: bool = False):
        self.requests: list[GenerateRequest] = []
        self._silent, self._fails, self._hangs = reports, fails, hangs

    def status(self) -> ReplicaStatus:
        if self._silent:
            self._silent -= 1
            raise EngineUnavailable("the engine has just started")
        stats = engine_stats(blocks_total=100, block_size=16)
        return ReplicaStatus.of(EngineStatus(engine_id="new", ended=[], stats=stats, last_step_age_s=0.0), {})

    async def run_request(self, request: EncodedRequest) -> None:
        self.requests.append(msgspec.msgpack.decode(request.start, type=Add).request)
        if self._fails:
            raise EngineUnavailable("gone")
        if self._hangs:
            await asyncio.get_running_loop().create_future()


def warm(engine: Engine, found: list[HotPrefixes], timeout_s: float = 60.0) -> None:
    async def ask() -> list[HotPrefixes]:
        return found

    asyncio.run(
        warm_start(engine, ask, timeout_s=timeout_s, max_bytes=PLENTY, host="127.0.0.1", key=None)  # type: ignore[arg-type]
    )


def test_each_prefix_is_a_request_for_one_token_with_the_peer_as_its_holder(monkeypatch):
    monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.0)
    engine = Engine(reports=3)
    warm(engine, [told(A, prefix(1, 64, 2, "salt")), told(B, prefix(2, 32, 1))])
    first, second = engine.requests
    assert first.record(KVHolder) == KVHolder(A, 64) and second.record(KVHolder) == KVHolder(B, 32)
    assert (first.prompt, first.cache_salt, first.params.max_tokens) == ([1, *range(1, 64)], "salt", 1)
    assert first.prefill == "local" and first.reply_to.startswith("tcp://127.0.0.1:")


def test_a_peer_that_fails_costs_no_other_prefix():
    engine = Engine(fails=True)
    warm(engine, [told(A, prefix(1, 64, 2), prefix(2, 64, 1))])
    assert len(engine.requests) == 2


def test_a_replica_starts_although_the_others_cannot_be_asked():
    async def ask() -> list[HotPrefixes]:
        raise RuntimeError("the controller restarts")

    engine = Engine()
    asyncio.run(
        warm_start(engine, ask, timeout_s=60, max_bytes=PLENTY, host="127.0.0.1", key=None)  # type: ignore[arg-type]
    )
    assert not engine.requests


def test_it_ends_at_its_deadline():
    engine, began = Engine(hangs=True), time.monotonic()
    warm(engine, [told(A, prefix(1, 64, 2))], timeout_s=0.05)
    assert len(engine.requests) == 1 and time.monotonic() - began < 60


def test_without_peers_nothing_is_asked():
    engine = Engine()
    warm(engine, [])
    assert not engine.requests
