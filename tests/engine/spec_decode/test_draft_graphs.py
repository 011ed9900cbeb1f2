"""Passes of a drafter that are replays of graphs: the same drafts, and no more launches for more drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model.ops import dispatch
from engine.spec_decode.draft_model import DraftModel
from engine.spec_decode.eagle3 import eagle3_drafter
from tests.engine.spec_decode.draft_checkpoints import DRAFT_VOCAB, HIDDEN, VOCAB, PlainEagle3, write_authors
from tests.engine.spec_decode.draft_steps import BLOCK, MAX_LEN, DraftedSequences, load_target
from tests.models import make_model
from tests.products import few
from tests.tape import TapedDevice, tape_kernels

MOST, SIZES = 4, (1, 2, 4)
STEPS = (
    ({0: 7}, 4, {}, 16),
    ({1: 7, 0: 1}, 4, {}, 1),  # the blocks of one end between its drafts
    ({1: 2, 0: 1}, 3, {0: [7, 8, 9]}, 16),
    ({0: 3, 1: 1, 2: 5}, 2, {1: [1]}, 16),  # one row of padding
    ({0: 1, 1: 1, 2: 1}, 4, {}, 16),
    ({0: 1, 1: 1}, 1, {}, 16),  # no further pass
    ({2: 1, 0: 1}, 4, {}, 16),
)


class Counted(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Return sequences with a drafter, whose passes are graphs of these sizes."""
    monkeypatch.setattr(dispatch, "cpu_kernels", lambda dtype, device: False)
    tape_kernels(monkeypatch)
    options = {"vocab_size": VOCAB, "num_hidden_layers": 8, "max_position_embeddings": MAX_LEN}
    folder = make_model(tmp_path / "target", "llama", **options)
    target = load_target(folder)

    def of(kind: str, sizes: tuple[int, ...]) -> tuple[DraftedSequences, TapedDevice]:
        generator = torch.Generator().manual_seed(1)
        if kind == "eagle3":
            torch.manual_seed(2)
            head = PlainEagle3(norm_before_residual=False, draft_vocab=DRAFT_VOCAB)
            (tmp_path / "head").mkdir(exist_ok=True)
            drafter = eagle3_drafter(write_authors(tmp_path / "head", head), target)
        else:
            drafter = DraftModel(folder, target, 64)
        tokens = [torch.randint(VOCAB, (40,), generator=generator).tolist() for _ in range(3)]
        aux = [torch.randn(40, 3 * HIDDEN, generator=generator) for _ in tokens] if kind == "eagle3" else None
        sequences = DraftedSequences(drafter, tokens, [torch.zeros(40, HIDDEN) for _ in tokens], aux)
        device = TapedDevice()
        if sizes:
            with torch.inference_mode():
                drafter.capture(device, sizes, MAX_LEN // BLOCK, MOST, 2**40)
        return sequences, device

    return of


@pytest.mark.parametrize("kind", few(1, ["eagle3", "draft_model"]))
def test_drafts_are_those_without_graphs_and_each_further_one_is_a_replay(make, kind):
    (plain, _), (replayed, device) = make(kind, ()), make(kind, SIZES)
    for counts, num_drafts, wrong, room in STEPS:
        device.replays.clear()
        expected = list(plain.step(counts, num_drafts, wrong, room))
        assert list(replayed.step(counts, num_drafts, wrong, room)) == expected
        size = {1: 1, 2: 2, 3: 4}[len(counts)]
        assert device.replays == [size] * (num_drafts - 1)
        assert any(-1 in drafts for _, drafts in expected) == (room == 1)


@pytest.mark.parametrize("kind", few(1, ["draft_model", "eagle3"]))
def test_more_drafts_are_no_more_launches_of_the_host(make, kind):
    launched = {}
    for sizes in ((), SIZES):
        sequences, _ = make(kind, sizes)
        list(sequences.step({0: 5, 1: 5}, 2))
        for num_drafts in (2, 4):
            with Counted() as counted:
                list(sequences.step({0: 1, 1: 1}, num_drafts))
            launched[bool(sizes), num_drafts] = counted.count
    assert launched[True, 2] == launched[True, 4] < launched[False, 2]
    assert launched[False, 4] > launched[False, 2] + 40


def test_more_sequences_than_any_graph_has_rows_are_drafted_without(make):
    (plain, _), (replayed, device) = make("eagle3", ()), make("eagle3", (1, 2))
    counts = {0: 4, 1: 5, 2: 6}
    assert list(replayed.step(counts, 3)) == list(plain.step(counts, 3))
    assert not device.replays


def test_graphs_that_take_too_much_memory_or_cannot_be_captured_are_left_out(make, caplog):
    sequences, _ = make("eagle3", ())
    cache = sequences.drafter._cache

    class Full(TapedDevice):
        def capture(self, run):
            if len(self._graphs) == 2:
                raise RuntimeError("out of memory")
            return super().capture(run)

    with torch.inference_mode():
        sequences.drafter.capture(TapedDevice(row_mib=1), SIZES, MAX_LEN // BLOCK, MOST, 3 * 2**20)
        assert cache._graphs.sizes == [1, 2]
        sequences.drafter.capture(Full(), SIZES, MAX_LEN // BLOCK, MOST, 2**40)
    assert cache._graphs.sizes == [2, 4] and "1 rows cannot be captured: out of memory" in caplog.text
    assert len(list(sequences.step({0: 4}, 3))) == 1
