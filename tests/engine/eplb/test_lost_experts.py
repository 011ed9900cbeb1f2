"""Experts of an engine that is lost: the engines that are left have them again, with the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from engine.devices.free_memory import FreeMemory
from engine.distributed.exchange.all_gather import AllGather
from engine.distributed.exchange.all_to_all import AllToAll
from engine.distributed.exchange.expert_exchange import ExpertExchange
from engine.distributed.tp_group import ConnectedGroup, TPGroup
from engine.eplb.layer_slots import LayerSlots, add_slots
from engine.eplb.lost_experts import ExpertsDoNotFit, LostExperts, slots_of, spare_bytes
from engine.errors import StartupError
from engine.model.expert_split import ExpertShardPlan
from engine.model.fixed_order import in_fixed_order
from engine.model.layers.moe import Experts
from engine.model.shard import ShardPlan
from tests.batches import ByHand, load_by_hand
from tests.engine.model.quantization.checkpoints import FORMATS, quantize_folder
from tests.engine.model.test_data_parallel import STEPS, take
from tests.engine.model.test_expert_parallel import MIXTURES, QUICK, SHAPE
from tests.models import make_model, with_slow
from tests.mxfp4_files import make_mxfp4
from tests.ranks import on_all

TIMEOUT_S = 30.0
PLENTY = FreeMemory(2**40, "")


@contextmanager
def joined(size: int) -> Iterator[list[ConnectedGroup]]:
    """The ranks of a group, in threads of this process."""
    first = TPGroup.listen(size, device="cpu")
    with ThreadPoolExecutor(size) as pool:
        others = [pool.submit(TPGroup.connect, r, size, first.address, TIMEOUT_S, device="cpu") for r in range(1, size)]
        first.join(TIMEOUT_S)
        ranks = [first, *(other.result() for other in others)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


class Engines:
    """Engines that share experts, computed by hand."""

    def __init__(
        self, folder: Path, ranks: Sequence[ConnectedGroup], *, fixed_order: bool, redundant: int | None = None,
        exchange: Any = AllGather,
    ):  # fmt: skip
        self.exchanges = [ExpertExchange(rank, open_exchange=exchange) for rank in ranks]
        self.models: list[ByHand] = []
        for exchange in self.exchanges:
            plan = ExpertShardPlan(redundant_experts=redundant, expert_exchange=exchange)
            self.models.append(load_by_hand(folder, in_fixed_order(plan) if fixed_order else plan))
            if redundant is not None:
                add_slots(self.models[-1].model)
        self.lost = [LostExperts(model.model, folder, lambda: PLENTY) for model in self.models]

    def go_on(self, members: Sequence[int], ranks: Sequence[ConnectedGroup]) -> list[int]:
        """Let only these engines go on; returns how many experts each has read."""

        def share(rank: int) -> int:
            self.exchanges[members[rank]].use(ranks[rank])
            return self.lost[members[rank]].share(ranks[rank])

        return on_all(list(ranks), share)  # type: ignore[arg-type]

    def compute(self, members: Sequence[int]) -> list[list[Tensor]]:
        """What each of these engines computes in its own steps."""

        def run(rank: int) -> list[Tensor]:
            return take(self.models[members[rank]], self.exchanges[members[rank]], STEPS[rank])

        return on_all([TPGroup.single()] * len(members), run)


def layers(model: ByHand) -> list[Experts]:
    return [layer for layer in model.model.modules() if isinstance(layer, Experts)]


def held(model: ByHand) -> list[list[int]]:
    return [list(slots_of(layer).held) for layer in layers(model)]


def whole(model: ByHand) -> list[list[int]]:
    return [list(range(layer.num_experts)) for layer in layers(model)]


@pytest.mark.parametrize("family", with_slow(MIXTURES, [name for name in MIXTURES if name not in QUICK]))
def test_engines_that_are_left_have_all_experts_again_and_the_same_bits_in_a_fixed_order(tmp_path, family):
    folder = make_model(tmp_path, family)
    alone = [take(load_by_hand(folder, in_fixed_order(ShardPlan())), None, steps) for steps in STEPS]
    with joined(4) as four, joined(3) as three, joined(1) as one:
        engines = Engines(folder, four, fixed_order=True)
        assert sum(engines.go_on([0, 2, 3], three)) > 0
        for logits, expected in zip(engines.compute([0, 2, 3]), alone, strict=False):
            assert all(map(torch.equal, logits, expected))
        engines.go_on([2], one)
        assert [sorted(experts) for experts in held(engines.models[2])] == whole(engines.models[2])


@pytest.mark.parametrize("kind", ["float32", "mxfp4", "awq", pytest.param("fp8_blocks", marks=pytest.mark.slow)])
def test_without_a_fixed_order_they_have_the_logits_of_the_whole_model(tmp_path, kind):
    folder, twin = tmp_path / "model", tmp_path / "twin"
    if kind == "mxfp4":
        make_mxfp4(folder, twin)
    elif kind == "float32":
        folder = twin = make_model(folder, "qwen3_moe", **SHAPE)
    else:
        quantize_folder(make_model(tmp_path / "source", "qwen3_moe", **SHAPE), folder, twin, *FORMATS[kind])
    alone = [take(load_by_hand(twin), None, steps) for steps in STEPS]
    with joined(3) as three, joined(2) as two:
        engines = Engines(folder, three, fixed_order=False)
        engines.go_on([0, 2], two)
        for logits, expected in zip(engines.compute([0, 2]), alone, strict=False):
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("exchange", [AllGather, AllToAll])
def test_experts_with_copies_elsewhere_are_not_read_again_and_others_fill_empty_slots(tmp_path, exchange):
    folder = make_model(tmp_path, "qwen3_moe")
    alone = [take(load_by_hand(folder, in_fixed_order(ShardPlan())), None, steps) for steps in STEPS]
    placement = [[0, 1, 2, -1], [2, 3, 4, 5], [4, 5, 0, -1]]  # at first, each rank had two
    with joined(3) as three, joined(2) as two, joined(1) as one:
        engines = Engines(folder, three, fixed_order=True, redundant=6, exchange=exchange)
        for each in zip(*map(layers, engines.models), strict=True):
            for number, slot in ((0, 2), (1, 2), (1, 3), (2, 2)):
                expert = placement[number][slot]
                LayerSlots(each[number]).copy(slot, LayerSlots(each[expert // 2]), expert % 2)
            for layer in each:
                slots_of(layer).set(placement)  # type: ignore[attr-defined]
        read = engines.go_on([0, 2], two)
        assert sum(read) == len(layers(engines.models[0])), "expert 3 of each layer"
        assert {len(experts) for experts in held(engines.models[0])} == {4}
        for logits, expected in zip(engines.compute([0, 2]), alone, strict=False):
            assert all(map(torch.equal, logits, expected))
        engines.go_on([2], one)
        assert [sorted(experts) for experts in held(engines.models[2])] == whole(engines.models[2])


def test_experts_that_do_not_fit_are_an_error_of_all_engines_and_change_nothing(tmp_path):
    folder = make_model(tmp_path, "qwen3_moe")
    with joined(3) as three, joined(2) as two:
        engines = Engines(folder, three, fixed_order=False)
        before = [held(model) for model in engines.models]
        engines.lost[2]._free_memory = lambda: FreeMemory(100, "the box")  # type: ignore[method-assign]
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(engines.lost[number].share, two[rank]) for rank, number in enumerate((0, 2))]
            for call in calls:
                # of the rank that knows first, or of one that still waits for the others' answers
                with pytest.raises(
                    (ExpertsDoNotFit, StartupError), match=r"rank 1 needs 0.00 GiB .* 0.00 GiB are free \(the box\)"
                ):
                    call.result(TIMEOUT_S)
        assert [held(model) for model in engines.models] == before


@pytest.mark.parametrize("redundant", [None, 6])
def test_what_is_kept_free_is_enough_for_the_loss_of_any_engine(tmp_path, redundant):
    folder = make_model(tmp_path, "qwen3_moe")
    for victim in range(3):
        left = [number for number in range(3) if number != victim]
        with joined(3) as three, joined(2) as two:
            engines = Engines(folder, three, fixed_order=False, redundant=redundant)
            for number in left:
                spare = spare_bytes(layers(engines.models[number]), 3, 1)
                engines.lost[number]._free_memory = partial(FreeMemory, spare, "")  # type: ignore[method-assign]
            assert sum(engines.go_on(left, two)) > 0


def test_an_engine_lost_while_the_others_read_leaves_them_as_they_were(tmp_path):
    folder = make_model(tmp_path, "qwen3_moe")
    alone = [take(load_by_hand(folder, in_fixed_order(ShardPlan())), None, steps) for steps in STEPS]
    with joined(4) as four, joined(3) as three, joined(2) as two:
        engines = Engines(folder, four, fixed_order=True)
        before = held(engines.models[0])
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(engines.lost[number].share, three[rank]) for rank, number in enumerate((0, 1))]
            three[2].exchange(msgspec.json.encode(held(engines.models[2])).decode())  # and it is not heard of again
            for rank in (0, 1):
                three[rank].leave("engine 2 died")
            for call in calls:
                with pytest.raises(StartupError, match="engine 2 died"):
                    call.result(TIMEOUT_S)
        assert held(engines.models[0]) == before
        engines.go_on([0, 1], two)
        for logits, expected in zip(engines.compute([0, 1]), alone, strict=False):
            assert all(map(torch.equal, logits, expected))


def test_an_engine_lost_while_another_reads_interrupts_it_because_the_others_wait_for_it(tmp_path, monkeypatch):
    folder = make_model(tmp_path, "qwen3_moe")
    loaded: list[str] = []

    def load(parts: object, source: object, name: str, folder: Path) -> None:
        loaded.append(name)
        one[0].leave("engine 2 died")

    with joined(3) as three, joined(1) as one:
        engines = Engines(folder, three, fixed_order=False)
        before = held(engines.models[0])
        monkeypatch.setattr("engine.eplb.lost_experts.load_tensor", load)
        with pytest.raises(StartupError, match="engine 2 died"):
            engines.lost[0].share(one[0])
        assert len(loaded) == 1 and held(engines.models[0]) == before
