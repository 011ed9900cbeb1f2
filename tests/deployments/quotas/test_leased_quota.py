"""Several ingresses share limits through a store that may be slow, dead or empty, and die themselves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deployments.quotas.leased_quota import IDLE_S, PAUSE_S, PLACE_WAIT_S, Charge, LeasedQuota, Needs
from deployments.quotas.limits import BudgetLimit, KeyLimits, Limit
from deployments.quotas.record import CLOCKS_S, KEEP_S, LEASE_S, decode
from tests.examples import examples

MINUTE, HOLDERS = 60.0, 3
START = 1_800_000_000.0 // MINUTE * MINUTE
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
    quota: LeasedQuota
    requests: list[Open] = field(default_factory=list)
    exchange: tuple[bytes | None, bytes] | None = None
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
        #: What ingresses had spent without the store, and had not written when they died.
        self.lost: Counter[tuple[float, str]] = Counter()

    def start(self) -> Ingress:
        self.num_started += 1
        name = f"ingress-{self.num_started}"
        return Ingress(name, LeasedQuota(name, self.limits, HOLDERS, self.now))

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
        number=st.integers(0, HOLDERS - 1),
        tokens=st.integers(1, 30),
        seconds=st.integers(0, LAST),
        asks=st.booleans(),
    )
    def request(self, number: int, tokens: int, seconds: int, asks: bool) -> None:
        self.begin(number, tokens, seconds, asks)

    def begin(self, number: int, tokens: int, seconds: int, asks: bool) -> bool:
        """Return whether a request may begin."""
        ingress = self.live[number]
        needs: dict = {"requests": 1.0, "tokens": float(tokens), "parallel": 1.0, "engine_seconds": float(seconds)}
        charge = ingress.quota.take(needs, self.now)
        if charge is None and asks and ingress.exchange is None:
            ingress.quota.want(needs)
            self.exchange(ingress)
            ingress.quota.want(needs, -1)
            charge = ingress.quota.take(needs, self.now)
        if charge is not None:
            ingress.requests.append(Open(charge, needs, self.window))
            for unit, amount in needs.items():
                self.used[self.window if unit != "parallel" else 0.0, unit] += amount
        return charge is not None

    @rule(number=st.integers(0, HOLDERS - 1), tokens=st.integers(1, 30), seconds=st.integers(0, LAST))
    def nobody_is_refused_what_is_left(self, number: int, tokens: int, seconds: int) -> None:
        """Once all have written: the others have at most an eighth of it in reserve, and no place in vain."""
        self.all_write_and_nothing_that_was_spent_is_lost()
        record, live = decode(self.store or b""), {ingress.name for ingress in self.live}
        needs = {"requests": 1.0, "tokens": float(tokens), "parallel": 1.0, "engine_seconds": float(seconds)}
        enough = True
        for limit in self.limits:
            shares = record.windows[limit.name].shares
            left = limit.value - sum(s.spent + s.reserved * (name not in live) for name, s in shares.items())
            asked = 1e-6 if limit.is_cost else needs[limit.unit]  # the last request may exceed a budget
            enough = enough and asked <= (left if limit.is_whole else 7 / 8 * left)
        assert self.begin(number, tokens, seconds, True) or not enough

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
            ingress.exchange = self.store, ingress.quota.propose(self.store, self.now)

    @rule(number=st.integers(0, HOLDERS - 1), answer=st.sampled_from(["written", "lost", "failed"]))
    def exchange_ends(self, number: int, answer: str) -> None:
        """lost: written, but the ingress does not learn it."""
        ingress = self.live[number]
        if ingress.exchange is None:
            return
        (expected, new), ingress.exchange = ingress.exchange, None
        if answer != "failed" and self.store == expected:
            self.store = new
            if answer == "written":
                ingress.quota.commit(self.now)

    @rule(number=st.integers(0, HOLDERS - 1))
    def the_store_does_not_answer(self, number: int) -> None:
        quota = self.live[number].quota
        quota.short_of({}, self.now)  # begins new windows
        before = {limit.unit: quota._tallies[limit.name].reserve for limit in self.limits}
        quota.go_alone(self.now)
        for limit in self.limits:
            window = self.window if limit.duration else 0.0
            self.excess[window, limit.unit] += quota._tallies[limit.name].reserve - before[limit.unit]

    @rule(number=st.integers(0, HOLDERS - 1))
    def ingress_dies(self, number: int) -> None:
        dead, self.live[number] = self.live[number], self.start()
        for limit in self.limits:
            tally = dead.quota._tallies[limit.name]
            self.lost[tally.start, limit.unit] += max(0.0, tally.spent - tally.written.spent - tally.written.reserved)
        self.used[0.0, "parallel"] -= len(dead.requests)  # their engines end them

    @rule(number=st.integers(0, HOLDERS - 1))
    def the_store_loses_its_values(self, number: int) -> None:
        """Just after an ingress has read them."""
        ingress = self.live[number]
        ingress.exchange = None
        self.exchange(ingress)
        self.store = None
        self.exchange(ingress)

    def exchange(self, ingress: Ingress) -> None:
        self.store = ingress.quota.propose(self.store, self.now)
        ingress.quota.commit(self.now)

    @invariant()
    def no_more_is_used_than_the_limit_and_what_requests_cost_more_than_expected(self) -> None:
        """And than the last request of a budget, which may begin if anything is left."""
        for limit in self.limits:
            if limit.duration:
                key = self.window, limit.unit
                most = limit.value + self.excess[key] + (LAST if limit.is_cost else 1e-6)
                assert self.used[key] <= most, f"{limit.name} at {self.now - START}"

    @rule()
    def all_write_and_nothing_that_was_spent_is_lost(self) -> None:
        """Neither what dead ingresses have spent, except without the store."""
        for ingress in self.live:
            ingress.exchange = None
            self.exchange(ingress)
        record = decode(self.store or b"")
        for limit in self.limits:
            if limit.duration:
                taken = record.windows[limit.name].taken("nobody")
                written = self.used[self.window, limit.unit] - self.lost[self.window, limit.unit]
                assert taken >= written - 1e-6, f"{limit.name} at {self.now - START}"

    def teardown(self) -> None:
        self.all_write_and_nothing_that_was_spent_is_lost()


TestIngresses = Ingresses.TestCase
TestIngresses.settings = settings(max_examples=examples(400), stateful_step_count=60, deadline=None)


def needs(tokens: float = 1.0) -> Needs:
    return {"requests": 1.0, "tokens": tokens, "parallel": 1.0}


class Shared:
    """A store that answers, and ingresses that renew every second."""

    def __init__(self, limits: KeyLimits, names: str = "ab", now: float = START):
        self.now, self.value = now, None
        self.limits: list[Limit] = limits.all()
        self.quotas = {name: LeasedQuota(name, self.limits, len(names), now) for name in names}

    def exchange(self, name: str, now: float | None = None, *, leaving: bool = False) -> None:
        now = self.now if now is None else now
        self.value = self.quotas[name].propose(self.value, now, leaving)
        self.quotas[name].commit(now)

    def take(self, name: str, asked: Needs) -> Charge | None:
        quota = self.quotas[name]
        if (charge := quota.take(asked, self.now)) is not None:
            return charge
        quota.want(asked)
        self.exchange(name)
        quota.want(asked, -1)
        return quota.take(asked, self.now)

    def taken(self, limit: str) -> float:
        assert self.value is not None
        return decode(self.value).windows[limit].taken("nobody")


def test_all_of_a_limit_can_be_used_and_no_more_over_several_ingresses():
    shared = Shared(KeyLimits(rpm_limit=10))
    charges = [shared.take("ab"[i % 2], needs()) for i in range(20)]
    assert sum(charge is not None for charge in charges) == 10
    shared.now += MINUTE
    assert shared.take("a", needs()) is not None


def test_what_a_dead_ingress_had_reserved_counts_as_spent_after_its_lease_and_its_requests_have_ended():
    shared = Shared(KeyLimits(tpm_limit=100, max_parallel_requests=2))
    for _ in range(2):
        assert shared.take("a", needs(30)) is not None
    assert shared.take("b", needs(1)) is None, "all slots are taken"
    had = shared.taken("tpm_limit/1m")
    assert had > 60, "a has also reserved some"
    shared.now += LEASE_S + 1
    assert shared.take("b", needs(1)) is not None
    assert shared.take("b", needs(39)) is None, "a may have spent what it had reserved"


def test_an_ingress_that_was_only_silent_gets_back_what_it_had_not_spent():
    shared = Shared(KeyLimits(tpm_limit=100))
    charge = shared.take("a", needs(80))
    shared.now += LEASE_S + 1
    assert shared.take("b", needs(40)) is None
    assert charge is not None
    shared.quotas["a"].settle(charge, {"tokens": 10}, shared.now)
    shared.exchange("a", leaving=True)
    assert shared.value is not None
    assert decode(shared.value).windows["tpm_limit/1m"].shares["a"].spent == 10
    shared.now += 1
    assert shared.take("b", needs(40)) is not None


@pytest.mark.parametrize("silence_s", [60.0, KEEP_S + 60.0])
def test_a_budget_counts_each_request_once_however_long_its_ingress_was_silent(silence_s):
    shared = Shared(KeyLimits(budget_limits=(BudgetLimit(budget_duration="1mo", max_engine_seconds=100.0),)))
    for _ in range(3):
        charge = shared.take("a", {"engine_seconds": 1.0})
        assert charge is not None
        shared.quotas["a"].settle(charge, {"engine_seconds": 2.0}, shared.now)
        shared.exchange("a", leaving=True)
        assert shared.quotas["a"].is_settled
        shared.now += silence_s
        shared.exchange("b", leaving=True)
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


def test_less_and_less_is_reserved_the_less_is_left():
    shared = Shared(KeyLimits(tpm_limit=1000), "ab")
    while shared.take("a", {"tokens": 10.0}) is not None:
        shared.now += 0.1
        shared.exchange("a")
        assert shared.value is not None
        share = decode(shared.value).windows["tpm_limit/1m"].shares["a"]
        assert share.reserved <= (1000 - share.spent) / 8
    assert shared.taken("tpm_limit/1m") == 1000


def test_a_request_waits_for_a_place_only_if_another_ingress_may_give_one_back():
    shared, alone = Shared(KeyLimits(max_parallel_requests=8)), Shared(KeyLimits(max_parallel_requests=1), "a")
    charges = [shared.take("a", {"parallel": 1.0}) for _ in range(4)]
    shared.exchange("a")
    shared.now += IDLE_S + 1
    shared.exchange("a")
    for _ in range(4):
        assert shared.take("b", {"parallel": 1.0}) is not None
    assert shared.take("b", {"parallel": 1.0}) is None, "all places are taken"
    assert shared.quotas["b"].place_wait_s == PLACE_WAIT_S, "a has some, which may be free before it writes that"
    shared.exchange("a")
    for charge in charges:
        assert charge is not None
        shared.quotas["a"].settle(charge, {}, shared.now)
    assert shared.quotas["a"].has_scarce_places
    shared.exchange("a")
    assert shared.take("b", {"parallel": 1.0}) is not None
    assert alone.quotas["a"].place_wait_s == 0.0, "there is no other ingress"


def test_an_ingress_that_has_all_places_itself_waits_only_a_moment_for_one():
    shared = Shared(KeyLimits(max_parallel_requests=2))
    for _ in range(2):
        assert shared.take("a", {"parallel": 1.0}) is not None
    assert shared.take("a", {"parallel": 1.0}) is None
    assert shared.quotas["a"].place_wait_s == PAUSE_S


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
    assert decode(shared.value).windows["max_engine_seconds/1d"].shares["a"].spent == pytest.approx(6.0)
    assert shared.quotas["a"].refused({"parallel": 2.0}, shared.now) is None, "the store may be asked again"


def test_a_clock_that_is_behind_uses_the_window_of_the_others():
    shared = Shared(KeyLimits(rpm_limit=10), now=START + MINUTE - 1)
    assert shared.take("b", needs()) is not None
    late, shared.now = shared.now, START + MINUTE + 1
    for _ in range(10):
        assert shared.take("a", needs()) is not None
    shared.now = late
    assert sum(shared.take("b", needs()) is not None for _ in range(9)) < 9, "it had reserved some in the minute before"
    shared.exchange("b")
    assert shared.take("b", needs()) is None


@pytest.mark.parametrize("off_s", [-7 * 86400.0, -3600.0, 3600.0, 7 * 86400.0])
def test_an_ingress_whose_clock_is_wrong_neither_stops_the_others_nor_gives_them_another_limit(off_s):
    shared = Shared(KeyLimits(rpm_limit=10, max_parallel_requests=10), "abw")
    taken = 0
    for name in "abab":
        shared.exchange(name)  # now they know each other
    for _ in range(12):
        for name in "ab":
            taken += shared.take(name, needs()) is not None
            shared.exchange(name)
            shared.exchange("w", shared.now + off_s)
        shared.now += 1
    assert 10 <= taken <= 12, "what it has written over, each had spent in the second before"
    limit = shared.limits[0]
    assert {shared.quotas[name].ends_at(limit) for name in "ab"} == {START + MINUTE}
    shared.now = START + MINUTE
    assert shared.take("a", {"requests": 1.0}) is not None
    assert shared.take("b", {"requests": 1.0}) is not None


def test_a_lease_from_a_clock_that_is_ahead_is_no_longer_than_others():
    shared = Shared(KeyLimits(max_parallel_requests=1), "aw")
    assert shared.take("w", needs()) is not None
    shared.exchange("w", shared.now + 7 * 86400.0)
    shared.exchange("a")
    shared.now += LEASE_S + CLOCKS_S + 1
    assert shared.take("a", needs()) is not None, "w has been silent"


def test_without_a_store_an_ingress_spends_its_part_of_what_was_left_and_never_what_it_does_not_know():
    shared = Shared(KeyLimits(rpm_limit=100), "abcd")
    for _ in range(20):
        assert shared.take("a", needs()) is not None
    shared.exchange("a", leaving=True)
    for quota in (shared.quotas["a"], shared.quotas["b"]):
        quota.go_alone(shared.now)
        quota.go_alone(shared.now)
    taken = dict.fromkeys("ab", 0)
    for name in taken:
        while shared.quotas[name].take(needs(), shared.now) is not None:
            taken[name] += 1
    assert taken == {"a": 20, "b": 0}
    assert shared.quotas["b"].is_unknown(shared.limits[0])


def test_an_ingress_without_requests_gives_back_everything_and_has_nothing_more_to_write():
    budget = BudgetLimit(budget_duration="1d", max_budget=100.0)
    shared = Shared(KeyLimits(tpm_limit=1000, budget_limits=(budget,)))
    for _ in range(3):
        charge = shared.take("a", needs(10))
        assert charge is not None
        shared.quotas["a"].settle(charge, {"tokens": 12, "money": 0.1}, shared.now)
    seconds = 0
    while not shared.quotas["a"].is_settled:
        shared.now, seconds = shared.now + 1, seconds + 1
        shared.exchange("a")
    assert 1 < seconds < 10
    assert shared.taken("tpm_limit/1m") == pytest.approx(36)
    assert shared.taken("max_budget/1d") == pytest.approx(0.3)


def test_a_key_for_which_nobody_waits_any_more_is_settled_whatever_the_sums_of_costs_are():
    """Seed 317 of tests.days: 0.1 + 0.2 + 0.3 - 0.3 - 0.2 - 0.1 is not 0, and its ingress wrote for ever."""
    shared = Shared(KeyLimits(budget_limits=(BUDGET,)), "a")
    quota = shared.quotas["a"]
    for sign, amounts in ((1, (0.1, 0.2, 0.3)), (-1, (0.1, 0.2, 0.3))):
        for amount in amounts:
            quota.want({"engine_seconds": amount}, sign)
    shared.exchange("a")
    assert quota.is_settled


def test_what_is_given_back_is_not_spent_although_the_store_has_not_answered():
    shared = Shared(KeyLimits(rpm_limit=10))
    for _ in range(3):
        assert shared.take("a", needs()) is not None
    shared.exchange("a")
    shared.value = shared.quotas["a"].propose(shared.value, shared.now, leaving=True)
    while shared.take("b", needs()) is not None:
        pass
    assert shared.taken("rpm_limit/1m") == 10
    assert shared.quotas["a"].take(needs(), shared.now) is None


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
    new = shared.quotas["a"] = LeasedQuota("a", [], 2, shared.now)
    shared.value = new.propose(shared.value, shared.now)
    new.change(shared.limits, shared.now)
    new.commit(shared.now)
    assert new.is_unknown(shared.limits[0])
    assert shared.take("a", needs()) is not None
