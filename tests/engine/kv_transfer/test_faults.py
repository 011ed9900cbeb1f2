"""What becomes of a request when a process or the link between two engines fails, in every state of its handoff.

Always: its tokens are those of an engine alone, both engines give back all blocks, and the next handoff works. Each
case prints a line of the table in docs/handoff.md (`pytest -s -m ""`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.options.handoff import HandoffConfig
from engine.wire.messages import Abort
from engine.wire.stats.handoff_stats import HandoffInfo, HandoffStats
from tests.engine.kv_transfer.faulty_pair import Asked, FaultyPair, Member

BLOCK = 16
CHUNK = 64  # prompt tokens that prefill computes in one step
LENGTH = 700  # of prompts: ten chunks and a part of one
LEASE_S = 1.2
ATTEMPTS = 5  # to bring a request into a state
STATES = ["queued", "computing", "reading", "releasing", "decoding"]
BLOCK_BYTES = 4 * 2 * 4 * BLOCK * 32 * 4  # layers, K and V, heads, tokens, head_dim, float32


def each_state(fast: str) -> list[Any]:
    """All states; those beside `fast` only with `make test-all`."""
    return [state if state == fast else pytest.param(state, marks=pytest.mark.slow) for state in STATES]


def make_config(role: str | None, **options: int) -> EngineConfig:
    handoff = None
    if role is not None:
        times = {"lease_s": LEASE_S, "heartbeat_s": 0.2, "progress_s": 1.2, "accept_s": 2.0, "quarantine_s": 0.3}
        handoff = HandoffConfig(role=role, policy="always", transport="tcp", **times)
    defaults = {"dtype": "float32", "block_size": BLOCK, "num_gpu_blocks_override": 128, "num_threads": 1}
    return EngineConfig(**{**defaults, **options}, handoff=handoff)


def prompt(name: str, length: int = LENGTH) -> list[int]:
    return random.Random(name).choices(range(3, 4096), k=length)


@contextmanager
def one_engine() -> Iterator[Callable[[Asked], list[int]]]:
    """A function that returns what one engine answers."""
    before = torch.get_num_threads()
    core = build_engine(make_config(None))

    def answer(asked: Asked) -> list[int]:
        core.add(asked.request)
        tokens = []
        while core.has_work:
            tokens += [token for event in core.step() for token in event.delta.token_ids]
        return tokens

    try:
        yield answer
    finally:
        core.close()
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone() -> Iterator[Callable[[Asked], list[int]]]:
    with one_engine() as answer:
        yield answer


def make_pair() -> FaultyPair:
    prefill = make_config("prefill", max_num_batched_tokens=CHUNK, max_num_seqs=1)
    return FaultyPair(make_config("decode"), prefill)


@pytest.fixture(scope="module")
def pairs() -> Iterator[list[FaultyPair]]:
    pairs: list[FaultyPair] = []
    yield pairs
    for pair in pairs:
        pair.close()


@pytest.fixture
def pair(pairs: list[FaultyPair]) -> Iterator[FaultyPair]:
    """The same for all tests, as long as none fails."""
    pair = pairs.pop() if pairs else make_pair()
    yield pair
    if pair.is_settled:
        pairs.append(pair)
    else:
        pair.close()


# -- states ------------------------------------------------------------------------------------------------


class MissedError(Exception):
    """The handoff has failed, or its request has ended, before it came into the state that was wanted."""


class Case:
    """One request, brought into a state in which it stays until `leave`."""

    def __init__(self, pair: FaultyPair, state: str, fault: str):
        self.pair, self.state, self.fault = pair, state, fault
        self.members = dict(pair.members)
        for attempt in range(ATTEMPTS):
            self.name = f"{state}, {fault}, {attempt}"
            pair.settle()
            self.before = {name: stats(member) for name, member in self.members.items()}
            if self._reach():
                break
            self.leave()
            pair.end_of(self.name)
        else:
            pytest.fail(f"no request stayed {state}: this machine is too slow for a lease of {LEASE_S} s")
        self.faulted_at = time.monotonic()

    def _reach(self) -> bool:
        """False if it was missed, for instance because the machine stood still for a lease, or paced engines late."""
        try:
            getattr(self, f"_{self.state}")()
        except MissedError:
            return False
        return not self.has_failed

    def leave(self) -> None:
        """Nothing holds the request any more."""
        if self.state == "releasing":
            lose(self.pair, "to decode")
        self.pair.links["data"].release()
        self.leave_but_for_links()

    def leave_but_for_links(self) -> None:
        self._pace("prefill", None)
        self._pace("decode", None)
        if self.state == "queued" and "prefill" in self.pair.members:
            self.pair.prefill.send(Abort(f"before {self.name}"))

    def _ask(self) -> None:
        self.asked = self.pair.ask(self.name, prompt(self.name), max_tokens=12)

    def _pace(self, engine: str, steps: int | None) -> None:
        if engine in self.pair.members:
            self.pair.members[engine].process.pace(steps)

    def _queued(self) -> None:
        """Prefill has accepted the prefill request, and computes something else."""
        pair = self.pair
        before = pair.ask(f"before {self.name}", prompt("before", 20), to="prefill", max_tokens=2000)
        pair.until(lambda: bool(before.tokens), "prefill is busy")
        self._ask()
        self._until(lambda: self._is("decode", "reading") and pair.prefill.status.stats.waiting == 1, "queued")

    def _computing(self) -> None:
        """Prefill has computed three chunks, and decode is in the middle of reading them."""
        self._pace("prefill", 3)
        self.pair.links["data"].hold(after=BLOCK_BYTES * 5 // 2)
        self._ask()
        self._until(lambda: self.pair.links["data"].is_held, "in the middle of a read")

    def _reading(self) -> None:
        """Prefill has computed all, and decode is in the middle of the last read, and knows the first token."""
        pair = self.pair
        self._pace("prefill", LENGTH // CHUNK)
        self._ask()
        all_but_one = LENGTH // CHUNK * CHUNK // BLOCK
        self._until(lambda: self._is("decode", "reading", all_but_one * BLOCK_BYTES), "all but one chunk is read")
        pair.links["data"].hold(after=BLOCK_BYTES * 3 // 2)
        self._pace("prefill", None)
        self._until(lambda: self._is("prefill", "leased") and pair.links["data"].is_held, "in the last read")
        self._until(lambda: firsts(pair) == firsts_of(self.before["decode"]) + 1, "the first token is known")

    def _releasing(self) -> None:
        """Prefill has given up the blocks, and its answer to decode is on the way."""
        self._reading()
        self.pair.links["to decode"].hold()
        self.pair.links["data"].release()
        self._until(lambda: self._is("decode", "releasing") and not live(self.pair.prefill), "released")

    def _decoding(self) -> None:
        """Four tokens are out, and decode is in a step."""
        self._pace("decode", 3)
        self._ask()
        self._until(lambda: len(self.asked.tokens) == 4, "decoding")

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        self.pair.until(lambda: condition() or self.has_failed or self.asked.last is not None, what)
        if not condition():
            raise MissedError

    def _is(self, engine: str, state: str, num_bytes: int | None = None) -> bool:
        return any(
            info.state == state and (num_bytes is None or info.num_bytes == num_bytes)
            for info in live(self.pair.members[engine])
        )

    @property
    def has_failed(self) -> bool:
        return results(stats(self.pair.decode), "failed") > results(self.before["decode"], "failed")


def stats(member: Member) -> HandoffStats:
    assert member.status.handoffs is not None
    return member.status.handoffs


def live(member: Member) -> list[HandoffInfo]:
    return member.status.live_handoffs


def results(stats: HandoffStats, result: str) -> int:
    return sum(stats.results.get(result, {}).values())


def firsts(pair: FaultyPair) -> int:
    return firsts_of(stats(pair.decode))


def firsts_of(stats: HandoffStats) -> int:
    """How many first tokens decode got from prefill."""
    return stats.phase_seconds.get("compute", (0, 0.0))[0]


def lose(pair: FaultyPair, *links: str) -> None:
    """What is on its way there never comes; what is sent from now on does."""
    for name in links:
        pair.links[name].cut()
        pair.links[name].release()
        pair.links[name].heal()


# -- what always holds afterwards --------------------------------------------------------------------------


def ends_well(case: Case, alone: Callable[[Asked], list[int]]) -> None:
    pair, asked = case.pair, case.pair.end_of(case.name)
    assert asked.last is not None and asked.last.finish_reason == "length", asked.last
    assert asked.tokens == alone(asked)
    works_again(case, alone)
    assert asked.last is pair.asked[case.name].last, "it ends once"


def works_again(case: Case, alone: Callable[[Asked], list[int]]) -> None:
    """Both engines have given everything back, and hand over again."""
    pair, name = case.pair, f"after {case.name}"
    pair.settle()
    show(case, time.monotonic())
    pair.until(lambda: not stats(pair.decode).quarantined, "the pair has rested")
    before = results(stats(pair.decode), "received")
    for attempt in range(ATTEMPTS):  # the lease of one may end where the machine stands still
        fresh = pair.ask(f"{name} {attempt}", prompt(f"{name} {attempt}", 100))
        pair.end_of(f"{name} {attempt}")
        assert fresh.tokens == alone(fresh)
        pair.settle()
        if results(stats(pair.decode), "received") == before + 1:
            return
        pair.until(lambda: not stats(pair.decode).quarantined, "the pair has rested")
    pytest.fail("none came from prefill")


def show(case: Case, settled_at: float) -> None:
    """The case's line of the table."""
    told = []
    for name, member in case.members.items():
        if case.pair.members[name] is member:
            told += [f"{name}: {line}" for line in news(case.before[name], stats(member))]
        else:
            told.append(f"{name}: restarted")
    asked = case.asked
    assert asked.last is not None
    outcome = "same text" if asked.last.finish_reason == "length" else asked.last.finish_reason
    times = f"{asked.ended_at - case.faulted_at:.1f} | {settled_at - case.faulted_at:.1f}"
    print(f"\n| {case.state} | {case.fault} | {outcome} | {'; '.join(told) or 'nothing'} | {times} |")


def news(before: HandoffStats, after: HandoffStats) -> Iterator[str]:
    for result, reasons in after.results.items():
        for reason, count in reasons.items():
            if new := count - before.results.get(result, {}).get(reason, 0):
                yield f"{result} {reason}".strip() + (f" x{new}" if new > 1 else "")
    if new := after.stale_messages - before.stale_messages:
        yield f"{new} late messages dropped"


# -- processes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", each_state("computing"))
def test_prefill_is_killed(pair, alone, state):
    case = Case(pair, state, "prefill killed")
    pair.kill("prefill")
    case.leave()
    pair.end_of(case.name)
    pair.start("prefill")
    ends_well(case, alone)


@pytest.mark.parametrize("state", each_state("reading"))
def test_decode_is_killed(pair, alone, state):
    """Nobody tells prefill: its lease is what ends."""
    case = Case(pair, state, "decode killed")
    pair.kill("decode")
    case.leave()
    pair.start("decode")
    ends_well(case, alone)


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_prefill_stops_for_longer_than_the_lease(pair, alone, state):
    case = Case(pair, state, "prefill stopped")
    pair.prefill.process.stop()
    case.leave()
    pair.until(lambda: time.monotonic() > case.faulted_at + LEASE_S, "the lease is over")
    pair.end_of(case.name)
    pair.prefill.process.go_on()
    ends_well(case, alone)


@pytest.mark.slow
@pytest.mark.parametrize("state", each_state("computing"))
def test_decode_stops_until_prefill_has_given_its_blocks_to_others(pair, alone, state):
    case = Case(pair, state, "decode stopped")
    pair.decode.process.stop()
    if state != "queued":
        case.leave()
    pair.until(lambda: not live(pair.prefill), "the lease is over")
    if state == "queued":
        case.leave()
    others = f"others {case.name}"
    pair.ask(others, prompt(others, 2000), to="prefill", max_tokens=1)
    pair.end_of(others)
    pair.decode.process.go_on()
    ends_well(case, alone)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_many_requests_outlive_a_process(pair, alone, victim):
    """In whatever states they are."""
    pair.settle()
    many = [pair.ask(f"{victim} {i}", prompt(f"{victim} {i}", 100 + 90 * i), max_tokens=20) for i in range(8)]
    pair.until(lambda: any(asked.last for asked in many), "some are on their way")
    pair.kill(victim)
    pair.start(victim)
    for asked in many:
        assert pair.end_of(asked.request.request_id).tokens == alone(asked)
    pair.settle()


# -- the link ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", each_state("computing"))
def test_the_link_is_cut(pair, alone, state):
    """Connections end, and no new ones come about."""
    case = Case(pair, state, "link cut")
    for link in pair.links.values():
        link.cut()
    case.leave_but_for_links()
    pair.until(lambda: case.has_failed or case.asked.last is not None, "decode has noticed")
    for link in pair.links.values():
        link.release()
        link.heal()
    ends_well(case, alone)


@pytest.mark.slow
@pytest.mark.parametrize("state", each_state("releasing"))
def test_the_link_swallows_all(pair, alone, state):
    """Connections stay, but nothing comes; later it does."""
    case = Case(pair, state, "link silent")
    for link in pair.links.values():
        link.hold()
    case.leave_but_for_links()
    pair.until(lambda: case.has_failed or case.asked.last is not None, "decode has noticed")
    for link in pair.links.values():
        link.release()
    ends_well(case, alone)


@pytest.mark.slow
@pytest.mark.parametrize(("state", "blocks"), [("computing", LENGTH / BLOCK - 2.5), ("reading", 2.5)])
def test_a_slow_link_is_waited_for_beyond_the_lease(pair, alone, state, blocks):
    """blocks: that are still to come."""
    case = Case(pair, state, "link slow")
    pair.links["data"].throttle(blocks * BLOCK_BYTES / (1.5 * LEASE_S))
    case.leave()
    pair.end_of(case.name)
    pair.links["data"].throttle(None)
    ends_well(case, alone)
    assert not case.has_failed


@pytest.mark.parametrize("state", [pytest.param("computing", marks=pytest.mark.slow), "reading"])
def test_a_damaged_chunk_is_not_used(pair, alone, state):
    case = Case(pair, state, "chunk damaged")
    pair.links["data"].corrupt(after=BLOCK_BYTES // 3)
    case.leave()
    ends_well(case, alone)
    assert case.has_failed


# -- the client --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", each_state("queued"))
def test_the_client_leaves(pair, alone, state):
    case = Case(pair, state, "client gone")
    pair.decode.send(Abort(case.name))
    if state == "decoding":  # decode is in a step, after which it hears of it
        case.leave()
    last = pair.end_of(case.name).last
    assert last is not None and last.finish_reason == "abort"
    case.leave()
    works_again(case, alone)
