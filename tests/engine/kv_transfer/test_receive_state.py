"""The blocks of a handoff in several KV cache groups: which are read when, and what of the prompt is then known to be
right."""

from __future__ import annotations

from itertools import accumulate

import hypothesis.strategies as st
from hypothesis import given

from engine.kv_transfer.protocol.messages import Progress
from engine.kv_transfer.protocol.receive_state import MAX_READ_TOKENS, ReceiveState
from engine.wire.handoff import FirstToken
from engine.wire.remote_request import Peer, RemoteRequest
from engine.wire.sampling_params import SamplingParams

SIZE = 16


def request(tokens: int, skip: int) -> RemoteRequest:
    return RemoteRequest(
        handoff_id="h", request_id="r", attempt=1, token_ids=[1] * tokens, num_prompt=tokens, params=SamplingParams(),
        seed=0, cache_salt="", skip=skip, fingerprint="", decode=Peer("decode", "tcp://127.0.0.1:1", 1),
    )  # fmt: skip


def progress(upto: int, blocks: list[int], *, last: bool, echo: int = 0) -> Progress:
    first = FirstToken(5, None, b"", 0, []) if last else None
    return Progress("h", 1, [{}], blocks, upto, first, echo)


def reads(state: ReceiveState) -> list[tuple[int, int, int]]:
    found = []
    while read := state.start():
        found.append(read)
    return found


@given(
    skipped=st.integers(0, 3),
    tokens=st.integers(1, 700),
    tails=st.lists(st.integers(0, 5), max_size=2),
    cuts=st.lists(st.integers(1, 700), max_size=4),
)
def test_blocks_are_read_once_in_order_and_no_read_goes_over_the_end_of_a_group(skipped, tokens, tails, cuts):
    skip, total = skipped * SIZE, skipped * SIZE + tokens
    counts = [-(-tokens // SIZE), *tails]
    groups = [[100 * group + i for i in range(count)] for group, count in enumerate(counts)]
    remote = [1000 + block for group in groups for block in group]
    state, found = ReceiveState(request(total, skip), groups, SIZE), []
    for upto in sorted(skip + min(cut, tokens - 1) // SIZE * SIZE for cut in cuts):
        assert state.update(progress(upto, remote[: (upto - skip) // SIZE], last=False)) is None
        found += reads(state)
        assert all(group == 0 and stop <= (upto - skip) // SIZE for _, stop, group in found)
    assert state.update(progress(total, remote, last=True)) is None
    found += reads(state)
    ends = list(accumulate(counts))
    assert [start for start, _, _ in found] == [0, *(stop for _, stop, _ in found[:-1])]
    assert found[-1][1] == len(remote)
    for start, stop, group in found:
        assert ends[group] - counts[group] <= start < stop <= ends[group]
        assert stop - start <= MAX_READ_TOKENS // SIZE


@given(tokens=st.integers(1, 200), tail=st.integers(1, 4), validated=st.integers(0, 20))
def test_with_several_groups_nothing_is_verified_before_everything_is(tokens, tail, validated):
    groups = [list(range(-(-tokens // SIZE))), list(range(tail))]
    blocks = [block for group in groups for block in group]
    state = ReceiveState(request(tokens, 0), groups, SIZE)
    assert state.update(progress(tokens, blocks, last=True)) is None
    for heartbeat, _ in enumerate(reads_one_by_one(state), 1):
        if heartbeat <= validated:
            state.echoed(heartbeat)
    whole = state.validated == len(blocks)
    assert state.complete
    assert state.verified == (tokens // SIZE * SIZE if whole else 0)


def reads_one_by_one(state: ReceiveState):
    """Read what there is; the blocks of each read are validated by the heartbeat after it."""
    count = 0
    while state.start():
        count += 1
        state.ended(count)
        yield count


def test_one_group_that_keeps_all_tokens_keeps_what_a_failed_handoff_has_brought():
    state = ReceiveState(request(100, 0), [list(range(7))], SIZE)
    for heartbeat, upto in enumerate((32, 64), 1):
        state.update(progress(upto, list(range(upto // SIZE)), last=False))
        assert [stop - start for start, stop, _ in reads(state)] == [2]
        state.ended(heartbeat)
    state.echoed(1)
    assert state.verified == 32
    state.echoed(2)
    assert state.verified == 64


def held(upto: int, blocks: list[int], said: int | None = None) -> Progress:
    return Progress("h", 1, [{}], blocks, upto, FirstToken(-1, None, b"", upto if said is None else said, []), 0)


def test_of_blocks_asked_for_by_name_the_first_may_be_all_there_are():
    state = ReceiveState(request(10 * SIZE, 2 * SIZE), [list(range(8))], SIZE, named=True)
    assert state.update(held(5 * SIZE, [100, 101, 102])) is None
    assert reads(state) == [(0, 3, 0)]
    assert (state.local, state.remote) == ([0, 1, 2], [100, 101, 102])
    assert not state.complete
    state.ended(1)
    assert state.complete and state.is_asked_prompt
    assert state.verified == 2 * SIZE, "nothing is proven yet"
    state.echoed(1)
    assert state.verified == 5 * SIZE


@given(
    named=st.booleans(),
    tail=st.integers(0, 2),
    upto=st.integers(3, 9),
    said=st.one_of(st.none(), st.integers(1, 9)),
)
def test_a_part_is_refused_where_it_cannot_be_used(named, tail, upto, said):
    state = ReceiveState(request(10 * SIZE, 2 * SIZE), [list(range(8)), [9] * tail][: 1 + (tail > 0)], SIZE, named)
    problem = state.update(held(upto * SIZE, list(range(8 + tail)), None if said is None else said * SIZE))
    usable = named and not tail and said in (None, upto)
    assert (problem is None) == usable
    assert usable or not (state.complete or reads(state))
