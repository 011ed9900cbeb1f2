"""Several ingresses share limits through a store that may be slow, dead or empty, and die themselves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deployments.quotas.limits import BudgetLimit, KeyLimits, Limit, Shortage
from deployments.quotas.record import CLOCKS_S, KEEP_S, LEASE_S, QuotaRecord, decode
from deployments.quotas.shared_quota import PAUSE_S, PLACE_PAUSE_S, Charge, Needs, Proposal, SharedQuota
from tests.examples import examples

MINUTE, HOLDERS = 60.0, 3
START = 1_800_000_000.0 // MINUTE * MINUTE
YEAR = 365 * 86400.0
NIGHT = START // 86400 * 86400 + 86400 - 1800  # half an hour before the next day
LAST = 9  # seconds of a request at most
BUDGET = BudgetLimit(budget_duration="1m", max_engine_seconds=50.0)
LIMITS = KeyLimits(rpm_limit=20, tpm_limit=100, max_parallel_requests=4, budget_limits=(BUDGET,))


@dataclass(slots=True)
class Open:
    """A request under way, and what its ingress has charged for it."""

    charge: Charge
    needs: dict[str, float]
    start: float


@dataclass(slots=True)
class Ingress:
    name: str
    quota: SharedQuota
    requests: list[Open] = field(default_factory=list)
    exchange: tuple[bytes | None, Proposal] | None = None
    """What the store had, and what is to be written."""


class Ingresses(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = START
        self.store: bytes | None = None
        self.num_started = 0
        self.limits = LIMITS.all()
        self.live = [self.start() for _ in range(HOLDERS)]
        #: What has really been used, by window and unit.
        self.used: Counter[tuple[float, str]] = Counter()
        #: By how much that may exceed the limit.
        self.excess: Counter[tuple[float, str]] = Counter()
        #: What ingresses had used and not written when they died.
        self.lost: Counter[tuple[float, str]] = Counter()

    def start(self) -> Ingress:
        self.num_started += 1
        name = f"ingress-{self.num_started}"
        return Ingress(name, SharedQuota(name, self.limits, HOLDERS, self.now))

    @property
    def window(self) -> float:
        return self.now // MINUTE * MINUTE

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(times=st.integers(1, 4))
    def all_renew(self, times: int) -> None:
        for _ in range(times):
            self.now += 1.0
            for ingress in self.live:
                ingress.exchange = None
                self.exchange(ingress)

    @rule(
        number=st.integers(0, HOLDERS - 1), tokens=st.integers(1, 30), seconds=st.integers(0, LAST), alone=st.booleans()
    )
    def request(self, number: int, tokens: int, seconds: int, alone: bool) -> None:
        """alone: whether the store does not answer."""
        self.begin(number, tokens, seconds, alone)

    def begin(self, number: int, tokens: int, seconds: int, alone: bool = False) -> bool:
        """Return whether a request may begin."""
        ingress = self.live[number]
        needs: dict = {"requests": 1.0, "tokens": float(tokens), "parallel": 1.0, "engine_seconds": float(seconds)}
        if alone:
            outcome = ingress.quota.alone(needs, self.now)
        else:
            ingress.exchange = None
            (outcome,) = self.exchange(ingress, needs)
        if not isinstance(outcome, Charge):
            return False
        ingress.requests.append(Open(outcome, needs, self.window))
        for unit, amount in needs.items():
            key = self.window if unit != "parallel" else 0.0, unit
            self.used[key] += amount
            self.excess[key] += amount * alone
        return True

    @rule(number=st.integers(0, HOLDERS - 1), tokens=st.integers(1, 30), seconds=st.integers(0, LAST))
    def nobody_is_refused_what_is_left(self, number: int, tokens: int, seconds: int) -> None:
        self.all_write_and_nothing_that_was_used_is_lost()
        record = decode(self.store or b"")
        needs = {"requests": 1.0, "tokens": float(tokens), "parallel": 1.0, "engine_seconds": float(seconds)}
        enough = True
        for limit in self.limits:
            left = limit.value - self.taken(record, limit)
            enough = enough and (left > 0 if limit.is_cost else needs[limit.unit] <= left)
        assert self.begin(number, tokens, seconds) is enough

    @rule(number=st.integers(0, HOLDERS - 1), which=st.integers(0, 9), tokens=st.integers(0, 60))
    def request_ends(self, number: int, which: int, tokens: int) -> None:
        ingress = self.live[number]
        if not ingress.requests:
            return
        ended = ingress.requests.pop(which % len(ingress.requests))
        used: dict = {"requests": 1.0, "tokens": float(tokens), "engine_seconds": tokens / 10}
        ingress.quota.settle(ended.charge, used, self.now)
        self.used[0.0, "parallel"] -= 1
        for unit in ("tokens", "engine_seconds"):
            more = used[unit] - ended.needs[unit]
            if ended.start == self.window or more > 0:
                self.used[self.window, unit] += more
                self.excess[self.window, unit] += max(0.0, more)

    @rule(number=st.integers(0, HOLDERS - 1))
    def exchange_begins(self, number: int) -> None:
        ingress = self.live[number]
        if ingress.exchange is None:
            ingress.exchange = self.store, ingress.quota.propose(self.store, self.now, self.now)

    @rule(number=st.integers(0, HOLDERS - 1), answer=st.sampled_from(["written", "lost", "failed"]))
    def exchange_ends(self, number: int, answer: str) -> None:
        """lost: written, but the ingress does not learn it."""
        ingress = self.live[number]
        if ingress.exchange is None:
            return
        (expected, new), ingress.exchange = ingress.exchange, None
        if answer != "failed" and self.store == expected:
            self.store = new.value
            if answer == "written":
                ingress.quota.commit(new, self.now, self.now)

    @rule(number=st.integers(0, HOLDERS - 1))
    def ingress_dies(self, number: int) -> None:
        dead, self.live[number] = self.live[number], self.start()
        for limit in self.limits:
            tally = dead.quota._tallies[limit.name]
            self.lost[tally.start, limit.unit] += max(0.0, tally.used - tally.written)
        self.used[0.0, "parallel"] -= len(dead.requests)  # their engines end them

    @rule(number=st.integers(0, HOLDERS - 1))
    def the_store_loses_its_values(self, number: int) -> None:
        """Just after an ingress has read them."""
        ingress = self.live[number]
        ingress.exchange = None
        self.exchange(ingress)
        self.store = None
        self.exchange(ingress)

    def exchange(self, ingress: Ingress, *asked: Needs) -> list[Charge | Shortage]:
        proposal = ingress.quota.propose(self.store, self.now, self.now, asked)
        self.store = proposal.value
        return ingress.quota.commit(proposal, self.now, self.now)

    def taken(self, record: QuotaRecord, limit: Limit) -> float:
        window = record.find(limit.name, limit.window(self.now)[0])
        assert window is not None
        return window.taken()

    @invariant()
    def no_more_is_used_than_the_limit_and_what_requests_cost_more_than_expected(self) -> None:
        """And than the last request of a budget, which may begin if anything is left."""
        for limit in self.limits:
            if limit.duration:
                key = self.window, limit.unit
                most = limit.value + self.excess[key] + (LAST if limit.is_cost else 1e-6)
                assert self.used[key] <= most, f"{limit.name} at {self.now - START}"

    @rule()
    def all_write_and_nothing_that_was_used_is_lost(self) -> None:
        """Neither what dead ingresses have used and written."""
        for ingress in self.live:
            ingress.exchange = None
            self.exchange(ingress)
        record = decode(self.store or b"")
        for limit in self.limits:
            if limit.duration:
                taken = self.taken(record, limit)
                written = self.used[self.window, limit.unit] - self.lost[self.window, limit.unit]
                assert taken >= written - 1e-6, f"{limit.name} at {self.now - START}"

    def teardown(self) -> None:
        self.all_write_and_nothing_that_was_used_is_lost()


TestIngresses = Ingresses.TestCase
TestIngresses.settings = settings(max_examples=examples(400), stateful_step_count=60, deadline=None)


def needs(tokens: float = 1.0) -> Needs:
    return {"requests": 1.0, "tokens": tokens, "parallel": 1.0}


class Shared:
    """A store that answers, and ingresses that renew every second."""

    def __init__(self, limits: KeyLimits, names: str = "ab", now: float = START):
        self.now, self.value = now, None
        self.limits: list[Limit] = limits.all()
        self.quotas = {name: SharedQuota(name, self.limits, len(names), now) for name in names}

    def exchange(self, name: str, now: float | None = None, *asked: Needs) -> list[Charge | Shortage]:
        now = self.now if now is None else now
        proposal = self.quotas[name].propose(self.value, now, self.now, asked)
        self.value = proposal.value
        return self.quotas[name].commit(proposal, now, self.now)

    def take(self, name: str, asked: Needs) -> Charge | None:
        (outcome,) = self.exchange(name, None, asked)
        return outcome if isinstance(outcome, Charge) else None

    def taken(self, limit: str) -> float:
        assert self.value is not None
        newest = decode(self.value).newest(limit, float("inf"))
        assert newest is not None
        return newest.taken()


def test_all_of_a_limit_can_be_used_and_no_more_over_several_ingresses():
    shared = Shared(KeyLimits(rpm_limit=10))
    charges = [shared.take("ab"[i % 2], needs()) for i in range(20)]
    assert sum(charge is not None for charge in charges) == 10
    shared.now += MINUTE
    assert shared.take("a", needs()) is not None


def test_requests_that_ask_at_once_get_what_is_left_in_their_order():
    shared = Shared(KeyLimits(tpm_limit=100))
    outcomes = shared.exchange("a", None, *(needs(tokens) for tokens in (60, 50, 30, 20, 10)))
    assert [isinstance(outcome, Charge) for outcome in outcomes] == [True, False, True, False, True]
    assert shared.taken("tpm_limit/1m") == 100


def test_what_a_dead_ingress_has_used_stays_used_and_its_requests_have_ended_after_its_lease():
    shared = Shared(KeyLimits(tpm_limit=100, max_parallel_requests=2))
    for _ in range(2):
        assert shared.take("a", needs(30)) is not None
    assert shared.take("b", needs(1)) is None, "all places are taken"
    shared.now += LEASE_S + 1
    assert shared.take("b", needs(41)) is None
    assert shared.take("b", needs(40)) is not None


def test_an_exchange_whose_answer_was_lost_counts_once():
    shared = Shared(KeyLimits(rpm_limit=10))
    quota = shared.quotas["a"]
    shared.value = quota.propose(shared.value, shared.now, shared.now, [needs()] * 3).value
    assert shared.taken("rpm_limit/1m") == 3, "they were refused, or begin without the store"
    shared.exchange("a")
    assert shared.taken("rpm_limit/1m") == 0
    assert [shared.take("b", needs()) is not None for _ in range(11)] == [True] * 10 + [False]


@pytest.mark.parametrize("others", ["", "b"])
@pytest.mark.parametrize("silence_s", [60.0, KEEP_S + 60.0])
def test_a_budget_counts_each_request_once_however_long_its_ingress_was_silent(silence_s, others):
    shared = Shared(KeyLimits(budget_limits=(BudgetLimit(budget_duration="1mo", max_engine_seconds=100.0),)))
    for _ in range(3):
        charge = shared.take("a", {"engine_seconds": 1.0})
        assert charge is not None
        shared.quotas["a"].settle(charge, {"engine_seconds": 2.0}, shared.now)
        shared.exchange("a")
        assert shared.quotas["a"].is_settled
        shared.now += silence_s
        for name in others:
            shared.exchange(name)
    assert shared.taken("max_engine_seconds/1mo") == pytest.approx(6.0)


def test_a_budget_that_is_used_up_refuses_requests_of_which_nothing_is_known():
    shared = Shared(KeyLimits(budget_limits=(BudgetLimit(budget_duration="1d", max_budget=1.0),)))
    charge = shared.take("a", {"money": 0.0})
    assert charge is not None
    shared.quotas["a"].settle(charge, {"money": 1.5}, shared.now)
    assert shared.take("a", {"money": 0.0}) is None
    shared.now += 86400
    assert shared.take("a", {"money": 0.0}) is not None, "the debt is forgotten with the day in which it was made"


def test_a_budget_is_used_to_its_end_also_by_requests_that_are_expected_to_cost_more_than_is_left():
    shared = Shared(KeyLimits(budget_limits=(BudgetLimit(budget_duration="1mo", max_engine_seconds=1.0),)), "abc")
    spent, refused = 0.0, 0
    for i in range(100):
        name = "abc"[i % 3]
        charge = shared.take(name, {"engine_seconds": 0.3})
        refused += charge is None
        if charge is not None:
            shared.quotas[name].settle(charge, {"engine_seconds": 0.07}, shared.now)
            spent += 0.07
    assert 1.0 <= spent < 1.0 + 0.07
    assert refused == 100 - round(spent / 0.07)


def test_what_was_refused_a_moment_ago_is_refused_without_the_store():
    shared = Shared(KeyLimits(rpm_limit=1, max_parallel_requests=5))
    assert shared.take("b", needs()) is not None
    quota = shared.quotas["a"]
    assert quota.refused(needs(), shared.now) is None, "nothing is known yet"
    assert shared.take("a", needs()) is None
    assert quota.refused(needs(), shared.now + PAUSE_S / 2) == Shortage(shared.limits[0], 0.0, 1.0)
    assert quota.refused(needs(), shared.now + PAUSE_S * 2) is None, "it may be more by now"
    assert quota.refused(needs(), shared.now - 60) is None, "the clock was set back"
    places = Shortage(shared.limits[1], 4.0, 5.0)
    assert shared.exchange("a", None, {"parallel": 5.0}) == [places]
    assert quota.refused({"parallel": 5.0}, shared.now + PLACE_PAUSE_S / 2) == places
    assert quota.refused({"parallel": 5.0}, shared.now + PLACE_PAUSE_S * 2) is None


def test_a_clock_that_is_set_back_goes_on_with_the_window_before_and_what_was_spent_in_it():
    budget = BudgetLimit(budget_duration="1d", max_engine_seconds=10.0)
    shared = Shared(KeyLimits(rpm_limit=10, max_parallel_requests=1, budget_limits=(budget,)), now=NIGHT)
    asked: Needs = {"requests": 1.0, "parallel": 1.0, "engine_seconds": 6.0}
    for now in (NIGHT, NIGHT + 3600):
        shared.now = now
        charge = shared.take("a", asked)
        assert charge is not None and shared.take("a", asked) is None, "the place is taken"
        shared.quotas["a"].settle(charge, asked, now)
        shared.exchange("a")
    shared.now = NIGHT + MINUTE
    taken = [shared.take("a", {"requests": 1.0}) is not None for _ in range(11)]
    assert taken == [True] * 10 + [False], "of a minute that had not begun before"
    assert shared.quotas["a"].ends_at(shared.limits[0]) == NIGHT + 2 * MINUTE
    shared.exchange("a")
    assert shared.value is not None
    day = decode(shared.value).find("max_engine_seconds/1d", NIGHT // 86400 * 86400)
    assert day is not None and day.used["a"] == pytest.approx(6.0)


def test_a_clock_that_is_behind_uses_the_window_of_the_others():
    shared = Shared(KeyLimits(rpm_limit=10), now=START + MINUTE - 1)
    assert shared.take("b", needs()) is not None
    late, shared.now = shared.now, START + MINUTE + 1
    for _ in range(9):
        assert shared.take("a", needs()) is not None
    shared.now = late
    assert [shared.take("b", needs()) is not None for _ in range(2)] == [True, False]


@pytest.mark.parametrize("other_off_s", [-1800.0, 2 * YEAR])
@pytest.mark.parametrize("off_s", [-YEAR, -7 * 86400.0, -3600.0, -MINUTE, MINUTE, 3600.0, 7 * 86400.0, YEAR])
def test_clocks_that_are_set_ahead_or_back_take_nothing_from_anybody(off_s, other_off_s):
    """Neither what a dead ingress has used, nor places, nor what they have used themselves before."""
    budget = BudgetLimit(budget_duration="1mo", max_engine_seconds=100.0)
    shared = Shared(KeyLimits(rpm_limit=10, max_parallel_requests=8, budget_limits=(budget,)), "abvw")
    rpm, parallel, month = shared.limits
    used = Counter({month.window(START)[0]: 8.0})
    for name in "abvw":
        shared.exchange(name)  # from now on they know each other
    for name, count in (("a", 2), ("b", 4), ("v", 1), ("w", 1), ("a", 0), ("v", 0)):
        shared.now += 0.1
        shared.exchange(name, None, *[{"requests": 1.0, "parallel": 1.0, "engine_seconds": 1.0}] * count)
    for _ in range(4):  # and b is dead
        for name, off in (("v", other_off_s), ("w", off_s)):
            wrong = shared.now + off
            asked: list[Needs] = [{"parallel": 1.0}, {"requests": 1.0, "engine_seconds": 1.0}]
            refused, passed = shared.exchange(name, wrong, *asked)
            assert refused == Shortage(parallel, 0.0, 1.0) and isinstance(passed, Charge)
            used[month.window(wrong)[0]] += 1.0
        assert shared.take("a", {"parallel": 1.0}) is None
        shared.now += 1.0
    assert sum(shared.take("a", {"requests": 1.0}) is not None for _ in range(9)) == 2
    for name in "vwa":
        assert shared.exchange(name, None, {"requests": 1.0}) == [Shortage(rpm, 0.0, 1.0)], "the clock is right again"
        assert shared.quotas[name].ends_at(rpm) == START + MINUTE
    record = decode(shared.value or b"")
    assert {start: window.taken() for start in used if (window := record.find(month.name, start))} == used
    shared.now += LEASE_S
    assert len([1 for _ in range(9) if shared.take("a", {"parallel": 1.0})]) == 4, "those of b, and no others"


def test_what_was_used_before_the_clock_was_ahead_for_several_windows_is_used_when_it_is_right_again():
    shared = Shared(KeyLimits(budget_limits=(BudgetLimit(budget_duration="1h", max_engine_seconds=10.0),)), "w")
    assert shared.take("w", {"engine_seconds": 6.0}) is not None
    for _ in range(4):
        shared.now += 600.0
        shared.exchange("w", shared.now + YEAR + 2400.0)
    assert shared.exchange("w", None, {"engine_seconds": 6.0}, {"engine_seconds": 1.0}) != [], "and its debt"
    window = decode(shared.value or b"").find(shared.limits[0].name, START)
    assert window is not None and window.taken() == pytest.approx(12.0)


def test_a_lease_from_a_clock_that_is_ahead_is_no_longer_than_others():
    shared = Shared(KeyLimits(max_parallel_requests=1), "aw")
    assert shared.take("w", needs()) is not None
    shared.exchange("w", shared.now + 7 * 86400.0)
    shared.exchange("a")
    shared.now += LEASE_S + CLOCKS_S + 1
    assert shared.take("a", needs()) is not None, "w has been silent"


def test_without_a_store_an_ingress_uses_its_part_of_what_was_left_and_never_what_it_does_not_know():
    shared = Shared(KeyLimits(rpm_limit=100), "abcd")
    for _ in range(20):
        assert shared.take("a", needs()) is not None
    for left in (20, 25):  # the next minute is a whole one
        taken = sum(isinstance(shared.quotas["a"].alone(needs(), shared.now), Charge) for _ in range(100))
        assert taken == left
        shared.now += MINUTE
    assert shared.quotas["b"].alone(needs(), shared.now) == Shortage(shared.limits[0], 0.0, 1.0, is_part=True)
    assert shared.quotas["b"].is_unknown(shared.limits[0])
    shared.exchange("a")
    assert shared.taken("rpm_limit/1m") == 0
    assert shared.take("a", needs()) is not None


def test_what_requests_have_used_is_written_once_they_have_ended():
    budget = BudgetLimit(budget_duration="1d", max_budget=100.0)
    shared = Shared(KeyLimits(tpm_limit=1000, budget_limits=(budget,)))
    quota = shared.quotas["a"]
    for _ in range(3):
        charge = shared.take("a", needs(10))
        assert charge is not None and not quota.is_settled
        quota.settle(charge, {"tokens": 12, "money": 0.1}, shared.now)
        assert not quota.is_settled
    shared.exchange("a")
    assert quota.is_settled
    assert shared.taken("tpm_limit/1m") == pytest.approx(36)
    assert shared.taken("max_budget/1d") == pytest.approx(0.3)


def test_what_a_request_did_not_use_is_no_credit_in_the_next_minute():
    shared = Shared(KeyLimits(tpm_limit=100), "a")
    charge = shared.take("a", needs(80))
    assert charge is not None
    shared.now += MINUTE
    shared.quotas["a"].settle(charge, {"tokens": 10}, shared.now)
    assert sum(shared.take("a", needs(10)) is not None for _ in range(20)) == 10


def test_limits_that_change_keep_what_was_spent():
    shared = Shared(KeyLimits(rpm_limit=10), "a")
    for _ in range(8):
        assert shared.take("a", needs()) is not None
    shared.quotas["a"].change(KeyLimits(rpm_limit=9, tpm_limit=5).all(), shared.now)
    assert shared.take("a", needs()) is not None
    assert shared.take("a", needs()) is None


def test_a_limit_that_was_removed_for_a_while_keeps_what_was_spent():
    shared = Shared(KeyLimits(rpm_limit=3, max_parallel_requests=2), "a")
    quota = shared.quotas["a"]
    charges = [shared.take("a", needs()) for _ in range(2)]
    quota.change([], shared.now)
    for charge in charges:
        assert charge is not None
        quota.settle(charge, needs(), shared.now)
    quota.change(shared.limits, shared.now)
    shared.exchange("a")
    assert shared.taken("rpm_limit/1m") >= 2
    assert [shared.take("a", needs()) is not None for _ in range(3)] == [True, False, False]
    shared.now += MINUTE
    assert shared.take("a", needs()) is not None, "one still runs"
    assert shared.take("a", needs()) is None


def test_a_limit_that_comes_while_the_store_is_asked_waits_for_the_next_answer():
    shared = Shared(KeyLimits(rpm_limit=3))
    shared.exchange("b")
    new = shared.quotas["a"] = SharedQuota("a", [], 2, shared.now)
    proposal = new.propose(shared.value, shared.now, shared.now)
    new.change(shared.limits, shared.now)
    new.commit(proposal, shared.now, shared.now)
    assert new.is_unknown(shared.limits[0])
    assert shared.take("a", needs()) is not None
