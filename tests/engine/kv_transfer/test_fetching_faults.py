"""What becomes of a prompt whose first KV is fetched when a process or the link between two engines fails.

Always: its tokens are those of an engine alone, both engines give back all blocks, and the next fetch works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from engine.config import EngineConfig
from engine.options.handoff import HandoffConfig
from engine.wire.messages import Abort, ResetPrefixCache
from engine.wire.parts.kv_fetching import FetchStats, KVHolder
from tests.engine.kv_transfer.faulty_pair import Asked, FaultyPair
from tests.engine.kv_transfer.test_faults import BLOCK, BLOCK_BYTES, LEASE_S, alone, live, prompt

LENGTH = 40 * BLOCK + 3
ATTEMPTS = 5  # to fetch again, after a fault
__all__ = ["alone"]


def make_config() -> EngineConfig:
    times = {"lease_s": LEASE_S, "heartbeat_s": 0.2, "progress_s": 1.2, "accept_s": 2.0, "quarantine_s": 0.3}
    handoff = HandoffConfig(role="replica", transport="tcp", enable_prefix_fetching=True, fetch_timeout_s=30.0, **times)
    return EngineConfig(dtype="float32", block_size=BLOCK, num_gpu_blocks_override=128, num_threads=1, handoff=handoff)


@pytest.fixture(scope="module")
def pair() -> Iterator[FaultyPair]:
    pair = FaultyPair(make_config(), make_config())
    yield pair
    pair.close()


class Case:
    """A prompt that `prefill` has cached, and that `decode` is asked to go on with."""

    def __init__(self, pair: FaultyPair, name: str):
        self.pair, self.name = pair, name
        self.cache(name)
        self.before = dict(pair.decode.status.stats.record(FetchStats).fetches)

    def cache(self, name: str) -> None:
        self.pair.ask(f"{name}, there", prompt(name, LENGTH), to="prefill", max_tokens=1)
        self.pair.end_of(f"{name}, there")
        self.pair.settle()
        self.holder = KVHolder(self.pair.peer_of("prefill"), LENGTH)

    def ask(self, name: str = "") -> Asked:
        return self.pair.ask(name or self.name, [*prompt(name or self.name, LENGTH), 7], holder=self.holder)

    def ask_and_read_a_part(self) -> None:
        self.pair.links["data"].hold(after=BLOCK_BYTES * 5 // 2)
        self.ask()
        self.pair.until(
            lambda: self.pair.links["data"].is_held and any(info.state == "reading" for info in live(self.pair.decode)),
            "in the middle of a read",
        )

    def ends_well(self, alone: Callable[[Asked], list[int]], outcome: str) -> None:
        pair, asked = self.pair, self.pair.end_of(self.name)
        assert asked.last is not None and asked.last.finish_reason == "length", asked.last
        assert asked.tokens == alone(asked)
        pair.settle()
        now = pair.decode.status.stats.record(FetchStats).fetches
        assert {key for key in now if now[key] > self.before.get(key, 0)} == {outcome}
        self.works_again(alone)

    def works_again(self, alone: Callable[[Asked], list[int]]) -> None:
        pair = self.pair
        pair.settle()
        for attempt in range(ATTEMPTS):  # the lease of one may end where the machine stands still
            pair.until(lambda: not pair.decode.status.handoffs.quarantined, "the pair has rested")
            before = pair.decode.status.stats.record(FetchStats).fetches.get("received", 0)
            name = f"{self.name}, again {attempt}"
            self.cache(name)
            fresh = self.ask(name)
            pair.end_of(name)
            assert fresh.tokens == alone(fresh)
            pair.settle()
            if pair.decode.status.stats.record(FetchStats).fetches.get("received", 0) == before + 1:
                return
        pytest.fail("nothing was fetched")


def test_without_a_fault(pair, alone):
    case = Case(pair, "no fault")
    case.ask()
    case.ends_well(alone, "received")
    assert pair.decode.status.stats.record(FetchStats).fetched_tokens >= LENGTH // BLOCK * BLOCK


def test_the_holder_is_killed_while_its_blocks_are_read(pair, alone):
    case = Case(pair, "killed while read")
    case.ask_and_read_a_part()
    pair.kill("prefill")
    pair.links["data"].release()
    pair.end_of(case.name)
    pair.start("prefill")
    case.ends_well(alone, "failed")


@pytest.mark.slow
def test_the_holder_is_gone_when_it_is_asked(pair, alone):
    case = Case(pair, "gone")
    pair.kill("prefill")
    case.ask()
    pair.end_of(case.name)
    pair.start("prefill")
    case.ends_well(alone, "failed")


@pytest.mark.slow
@pytest.mark.parametrize("reading", [False, True])
def test_the_holder_stands_still_for_longer_than_the_lease(pair, alone, reading):
    case = Case(pair, f"holder stands still, reading {reading}")
    if reading:
        case.ask_and_read_a_part()
    pair.prefill.process.stop()
    if not reading:
        case.ask()
    pair.links["data"].release()
    pair.end_of(case.name)
    pair.prefill.process.go_on()
    case.ends_well(alone, "failed")


@pytest.mark.slow
def test_the_asking_engine_stands_still_until_the_lease_has_expired(pair, alone):
    case = Case(pair, "decode stands still")
    case.ask_and_read_a_part()
    pair.decode.process.stop()
    pair.until(lambda: not live(pair.prefill), "the lease has expired")
    pair.prefill.send(ResetPrefixCache())
    others = pair.ask("others", prompt("others", 100 * BLOCK), to="prefill", max_tokens=200)
    pair.until(lambda: others.last is not None, "others have had the blocks")
    pair.links["data"].release()
    pair.decode.process.go_on()
    case.ends_well(alone, "failed")


@pytest.mark.slow
def test_the_link_is_cut(pair, alone):
    case = Case(pair, "link cut")
    case.ask_and_read_a_part()
    for link in pair.links.values():
        link.cut()
    pair.end_of(case.name)
    for link in pair.links.values():
        link.release()
        link.heal()
    case.ends_well(alone, "failed")


@pytest.mark.slow
def test_the_link_swallows_all(pair, alone):
    case = Case(pair, "link swallows")
    case.ask_and_read_a_part()
    for link in pair.links.values():
        link.hold()
    pair.end_of(case.name)
    for link in pair.links.values():
        link.release()
    case.ends_well(alone, "failed")


@pytest.mark.slow
def test_a_damaged_chunk_is_not_used(pair, alone):
    case = Case(pair, "damaged")
    pair.links["data"].corrupt(after=BLOCK_BYTES * 3 // 2)
    case.ask()
    case.ends_well(alone, "failed")


@pytest.mark.slow
def test_the_holder_has_lost_its_blocks(pair, alone):
    case = Case(pair, "lost")
    pair.prefill.send(ResetPrefixCache())
    case.ask()
    case.ends_well(alone, "failed")


@pytest.mark.slow
def test_the_client_leaves(pair, alone):
    case = Case(pair, "client leaves")
    case.ask_and_read_a_part()
    pair.decode.send(Abort(case.name))
    pair.end_of(case.name)
    pair.links["data"].release()
    case.works_again(alone)
