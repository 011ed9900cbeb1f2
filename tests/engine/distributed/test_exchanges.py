"""Rows that travel to the ranks that have their experts, and back: the same sums with every exchange."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from engine.distributed.exchange.all_gather import AllGather
from engine.distributed.exchange.all_to_all import AllToAll
from engine.distributed.exchange.expert_exchange import ExpertExchange, StepSize
from engine.distributed.exchange.members import PER_RANK, AllRanks, Counts, Members
from engine.distributed.tp_group import TPGroup
from engine.errors import EngineUnavailable
from tests.rank_pool import RankPool
from tests.ranks import ThreadGroup, make_ranks, on_all

K, HIDDEN, SLOTS = 4, 16, 4
TIMEOUT_S = 30.0
LAYOUTS = [(2, 1), (4, 1), (2, 2), (1, 4)]  # engines, and ranks of each
COUNTS = [[5, 3, 0, 9], [0, 0, 0, 1], [0, 0, 0, 0], [40, 40, 40, 40]]


class Rows(NamedTuple):
    """What an engine has to send."""

    x: Tensor
    places: Tensor
    weights: Tensor


def rows_of(engine: int, count: int, ranks: int, dtype: torch.dtype) -> Rows:
    generator = torch.Generator().manual_seed(engine)
    experts = torch.rand(count, ranks * SLOTS, generator=generator).argsort(dim=1)[:, :K]
    x = torch.randn(count, HIDDEN, generator=generator).to(dtype)
    return Rows(x, experts // SLOTS * PER_RANK + experts % SLOTS, torch.rand(count, K, generator=generator).to(dtype))


def products(x: Tensor, places: Tensor) -> Tensor:
    """What stands for the products of experts: [rows, k, hidden]."""
    return x[:, None] * (1 + (places % 7)[..., None]).to(x.dtype) / 3


def results(ranks: AllRanks, width: int, counts: Counts, dtype: torch.dtype, kind: Any) -> tuple[Tensor, Tensor]:
    """What a rank gets back: sums of rows, and products of pairs."""
    members = Members(ranks, width)
    own = rows_of(members.engine, counts[members.engine], ranks.size, dtype)
    found = kind(members).dispatch(*own, counts)
    here = (found.places.long() // PER_RANK == ranks.rank)[..., None]
    pairs = products(found.x, found.places.long()) * here
    sums = found.combine((pairs * found.weights[..., None]).sum(1).to(dtype))
    return sums, found.combine_pairs(torch.stack([pairs * (10**i) for i in range(width)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("engines", "width"), LAYOUTS)
@pytest.mark.parametrize("counts", COUNTS)
def test_all_to_all_gives_the_bits_of_all_gather_and_each_row_gets_the_products_of_its_experts(
    engines, width, counts, dtype
):
    counts, groups = counts[-engines:], make_ranks(engines * width)
    of_kinds = [
        on_all(groups, lambda rank, kind=kind: results(groups[rank], width, counts, dtype, kind))
        for kind in (AllGather, AllToAll)
    ]
    for rank, (gathered, sent) in enumerate(zip(*of_kinds, strict=True)):
        engine, place = divmod(rank, width)
        own = rows_of(engine, counts[engine], engines * width, dtype)
        pairs = products(own.x, own.places)
        for _, found in (gathered, sent):
            assert torch.equal(found, pairs * 10**place)
        sums = [sum(of_kind[engine * width + i][0] for i in range(width)) for of_kind in of_kinds]
        assert torch.equal(*sums)
        near = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(sums[0], (pairs * own.weights[..., None]).sum(1), **near)
        assert len(gathered[0]) == len(sent[0]) == counts[engine]


def compare(ranks: TPGroup) -> None:
    """In each of several processes: raise unless both exchanges give the same bits."""
    for counts in COUNTS:
        for dtype in (torch.float32, torch.bfloat16):
            gathered, sent = (results(ranks, 1, counts, dtype, kind) for kind in (AllGather, AllToAll))
            if not torch.equal(gathered[1], sent[1]):
                raise EngineUnavailable(f"other products with {counts} rows")
            if ranks.options["shared_memory"] and not torch.equal(gathered[0], sent[0]):  # type: ignore[attr-defined]
                raise EngineUnavailable(f"other sums with {counts} rows")
            torch.testing.assert_close(gathered[0], sent[0], rtol=0.05, atol=0.05)
    large = torch.full((700, 3000), float(ranks.rank))  # more than a chunk of shared memory
    numbers = [[700 if to == (rank + 1) % 4 else 0 for to in range(4)] for rank in range(4)]
    if not torch.equal(ranks.all_to_all(large, numbers), torch.full_like(large, (ranks.rank - 1) % 4)):
        raise EngineUnavailable("other rows than those that were sent")


def compare_there(rank: int, address: str, options: dict[str, Any]) -> None:
    ranks = TPGroup.connect(rank, 4, address, TIMEOUT_S, **options)
    compare(ranks)
    ranks.exchange("")
    ranks.close()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_four_processes_exchange_rows_through_shared_memory_or_gloo(shared_memory):
    options = {"device": "cpu", "shared_memory": shared_memory}
    with RankPool() as pool:
        ranks = TPGroup.listen(4, **options)
        for rank in range(1, 4):
            pool.call(rank, compare_there, rank, ranks.address, options)
        ranks.join(TIMEOUT_S)
        compare(ranks)
        ranks.exchange("")
        for rank in range(1, 4):
            pool.answer(rank)
        ranks.close()


def test_a_rank_sends_as_many_bytes_as_planning_counts():
    engines, width, tokens = 2, 2, 40
    row = HIDDEN * 4
    head = K * (4 + 4)  # places and weights
    counts, ranks = [tokens] * engines, engines * width

    def sums(rank: int, kind: Any) -> int:
        group: Any = groups[rank]
        found = kind(Members(group, width)).dispatch(*rows_of(rank // width, tokens, ranks, torch.float32), counts)
        found.combine(torch.zeros(len(found.x), HIDDEN))
        return group.sent_bytes

    groups = make_ranks(ranks)
    assert on_all(groups, lambda rank: sums(rank, AllGather)) == [(2 - 1 / 2) * tokens * (2 * row + head)] * ranks
    groups = make_ranks(ranks)
    sent = sum(on_all(groups, lambda rank: sums(rank, AllToAll)))
    remote = 0
    for rank in range(ranks):
        share = rows_of(rank // width, tokens, ranks, torch.float32).places[rank % width * 20 :][:20] // PER_RANK
        remote += sum(len(set(holders) - {rank}) for holders in share.tolist())
    told = ranks * (ranks - 1) * 2 * ranks * 8
    assert sent == remote * (2 * row + head) + told


def test_numbers_of_rows_that_nobody_can_have_told_are_those_of_an_aborted_exchange():
    class Aborted(ThreadGroup):
        def all_gather(self, x: Tensor) -> Tensor:
            return super().all_gather(x).fill_(2**40)

    groups: list[Any] = make_ranks(2)
    for group in groups:
        group.__class__ = Aborted

    def dispatch(rank: int) -> None:
        with pytest.raises(EngineUnavailable, match="an exchange of rows was aborted"):
            AllToAll(Members(groups[rank], 1)).dispatch(*rows_of(rank, 3, 2, torch.float32), [3, 3])

    on_all(groups, dispatch)


class OnDevice(TPGroup):
    """Ranks whose collectives wait for a device."""

    def all_gather(self, x: Tensor) -> Tensor:
        raise AssertionError("the host waits for a device before each step")


def test_all_ranks_know_the_sizes_of_all_steps_and_what_each_rank_tells_without_a_wait_for_a_device():
    groups = make_ranks(4)
    exchanges = [ExpertExchange(OnDevice(group.rank, 4), group, ranks_per_engine=2) for group in groups]
    told = [StepSize(9, 4, 6), None, None, StepSize(1, 1, 1)]  # only the first rank of an engine counts

    def begin(rank: int) -> tuple[bool, list[StepSize | None], list[int], bool]:
        own = exchanges[rank]
        return own.begin(told[rank], state=rank), own.sizes, own.states, own.has_step

    for rank, found in enumerate(on_all(groups, begin)):
        assert found == (True, [(9, 4, 6), None], [0, 1, 2, 3], rank < 2)
    assert not any(on_all(groups, lambda rank: exchanges[rank].begin(None)))


@pytest.mark.parametrize("engines", [2, 4])
def test_while_memory_is_measured_all_rows_go_to_all_ranks_with_the_results_of_those_that_need_them(engines):
    groups = make_ranks(engines)
    exchanges = [ExpertExchange(group, open_exchange=AllToAll) for group in groups]
    counts, x = [5] * engines, torch.randn(5, HIDDEN)
    places = torch.arange(K).repeat(5, 1)  # all on the first rank, as of the equal tokens of a dummy step

    def exchanged(rank: int) -> tuple[int, Tensor, Tensor]:
        rows = exchanges[rank].dispatch(x, places, torch.ones(5, K), counts)
        pairs = products(rows.x, rows.places.long()) * (rank == 0)
        return len(rows.x), rows.combine(pairs.sum(1)), rows.combine_pairs(pairs[None])

    def begin(rank: int) -> bool:
        return exchanges[rank].begin(StepSize(5))

    measured, _, real = on_all(groups, exchanged), on_all(groups, begin), on_all(groups, exchanged)
    assert [rows for rows, *_ in measured] == [5 * engines] * engines
    assert [rows for rows, *_ in real] == [5 * engines, *[0] * (engines - 1)]
    for (_, *before), (_, *after) in zip(measured, real, strict=True):
        assert all(map(torch.equal, before, after))
