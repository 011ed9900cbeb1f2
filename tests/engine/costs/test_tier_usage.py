"""Byte time of a tier against the definition: in each nanosecond, the holders of a block share it equally."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import hypothesis.strategies as st
from hypothesis import given

from engine.costs.request_cost import BlockAccount
from engine.costs.tier_usage import TierUsage
from engine.kv_offload.tier_index import TierIndex

UNIT = 7
NAMES, HOLDERS = (b"a", b"b", b"c"), (0, 1, 2)
changes = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "hold", "unhold"]),
        st.sampled_from(NAMES),
        st.sampled_from(HOLDERS),
        st.integers(0, 5),  # nanoseconds until the next change
    ),
    max_size=60,
)


@given(changes)
def test_holders_pay_their_parts_nobody_pays_for_the_cache_and_the_sum_is_exact(changes):
    index, usage = TierIndex(100), TierUsage(UNIT)
    index.usage = usage
    accounts = {holder: BlockAccount() for holder in HOLDERS}
    holds: set[tuple[int, bytes]] = set()
    due: Counter[int] = Counter()
    cached = total = Fraction(0)
    for what, name, holder, ns in changes:
        size = 1 + NAMES.index(name)
        match what:
            case "add" if not index.knows(name):
                index.add(name, size, 0.0)
                index.written(name)
            case "remove":
                index.remove(name)
            case "hold" if index.knows(name) and (holder, name) not in holds:
                index.hold(name)
                usage.taken(accounts[holder], name, index.size(name))
                holds.add((holder, name))
            case "unhold" if (holder, name) in holds:
                usage.returned(accounts[holder], name)
                holds.remove((holder, name))
        usage.now_ns += ns
        for each in filter(index.knows, NAMES):
            whole = Fraction(UNIT * index.size(each) * ns)
            holding = [holder for holder, held in holds if held == each]
            total += whole
            cached += 0 if holding else whole
            for holder in holding:
                due[holder] += whole / len(holding)
    paid = {
        holder: account.block_ns + sum(usage.per_reference(name) for own, name in holds if own == holder)
        for holder, account in accounts.items()
    }
    assert usage.byte_ns == total and usage.cached_byte_ns == cached
    assert sum(paid.values()) + usage.cached_byte_ns + usage.carried_byte_ns == usage.byte_ns
    for holder, value in paid.items():
        assert abs(value - due[holder]) <= len(changes) * len(HOLDERS)
