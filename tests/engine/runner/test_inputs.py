from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.config import EngineConfig
from engine.devices.device import Device
from engine.model.batch import row_tiles
from engine.runner import inputs
from engine.runner.graphs.cuda_graphs import StepColumns, StepShape
from engine.runner.graphs.gpu_layers import GPULayers, GPUStep
from engine.runner.inputs import InputBuilder
from engine.runner.layer_runner import LayerRunner
from engine.runner.sampler import prepare_sampling
from engine.runner.step import StepMemory
from engine.runner.step_layout import Sequences
from engine.wire.plan import NewSequence, StepPlan
from engine.wire.sampling_params import SamplingParams
from tests.late_device import LateDevice

PARAMS = {0: SamplingParams(temperature=0.6), 1: SamplingParams(temperature=0.0), 2: SamplingParams(top_p=0.9)}
PROMPT = [5, 6, 7]


def memory(slots: int, max_model_len: int) -> StepMemory:
    history = torch.zeros(slots, max_model_len, dtype=torch.int32)
    return StepMemory([torch.zeros(1, 1, 1, 1, 16, 1)], [None], history)


def builder() -> InputBuilder:
    model = cast(Any, SimpleNamespace(vocab_size=50, eos_token_ids=(), recurrent=None))
    return InputBuilder(
        EngineConfig(model="", max_num_seqs=4),
        model,
        Device(torch.device("cpu")),
        memory(slots=4, max_model_len=64),
        LayerRunner(cast(Any, SimpleNamespace(model=model)), cast(Any, None)),
    )


def step(number: int, start: int, params: dict[int, SamplingParams], added: bool = False) -> StepPlan:
    """A step that samples for these slots, with all that comes before the token at `start` computed."""
    new = [NewSequence(slot, PROMPT, len(PROMPT), own, seed=slot) for slot, own in params.items()]
    count = len(PROMPT) if added else 1
    many = [start] * len(params), [count] * len(params), [True] * len(params)
    return StepPlan(number, new if added else [], [], list(params), *many)


def drawn(builder: InputBuilder, plan: StepPlan) -> list[list[Any]]:
    """What its rows are drawn by."""
    groups = builder.build(plan).sampling.random
    values = ([getattr(group, field.name) for field in fields(group)] for group in groups)
    return [[v.tolist() if isinstance(v, Tensor) else v for v in group] for group in values]


def test_each_token_that_verifies_a_draft_is_a_sequence_that_sees_those_before_it():
    plain = Sequences(np.array([3, 0, 5]), np.array([7, 3, 1]), np.array([7, 20, 9]))
    divided, first = plain.divided(np.array([False, True, False]))
    assert divided.slots.tolist() == [3, 0, 0, 0, 5]
    assert divided.counts.tolist() == [7, 1, 1, 1, 1]
    assert divided.ends.tolist() == [7, 18, 19, 20, 9]
    assert first.tolist() == [0, 1, 4]


def test_a_gpu_reads_the_keys_of_a_sequence_once_for_all_its_drafts():
    """As many keys as without drafts, and the few that are new; in a graph in which no sequence decodes alone."""
    seqs, drafts, length, rows = 64, 3, 1000, 8
    shape = StepShape(seqs * (drafts + 1), seqs, rows, verified=drafts + 1)
    model = cast(Any, SimpleNamespace(vocab_size=50, eos_token_ids=(), recurrent=None))
    steps = GPULayers(cast(Any, SimpleNamespace(model=model)), cast(Any, None))
    steps.graphs = cast(Any, SimpleNamespace(shape_for=lambda *sizes: shape if shape.holds(*sizes) else None))
    builder = InputBuilder(
        EngineConfig(model="", max_num_seqs=seqs), model, LateDevice(),
        memory(slots=seqs, max_model_len=2048), steps,
    )  # fmt: skip
    added = [NewSequence(slot, PROMPT, len(PROMPT), PARAMS[1], seed=0) for slot in range(seqs)]
    counts = [drafts + 1 if slot % 2 else 1 for slot in range(seqs)]  # half of them have none
    plan = StepPlan(0, added, [], list(range(seqs)), [length] * seqs, counts, [True] * seqs)
    plan.drafts.update({slot: [5] * drafts for slot in range(1, seqs, 2)})
    built = builder.build(plan)
    built.staged.send()
    assert isinstance(built.prepared, GPUStep) and built.prepared.graph is not None
    chosen, buffer = built.prepared.graph
    assert chosen is shape
    columns = StepColumns.of(buffer.numpy(), shape, np.int64)
    seq, _, tile_rows, after = columns.tiles.reshape(-1, 4).T
    keys = np.where(tile_rows > 0, columns.kv_len[seq] - after, 0).sum()
    assert tile_rows.sum() == sum(counts) and (columns.single == -1).all()
    assert keys <= 1.01 * seqs * (length + 1)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), min_size=1, max_size=6), st.integers(1, 16))
def test_tiles_hold_the_rows_of_each_chunk_once_the_last_ones_first(chunks, rows):
    tiles, first, expected = [], 0, []
    for seq, (count, gap) in enumerate(chunks):
        tiles.append((seq, first, count, count))
        for row in range((count - 1) // rows * rows, -1, -rows):
            here = min(rows, count - row)
            expected.append([seq, first + row, here, count - row - here])
        first += count + gap
    assert row_tiles(tiles, rows).tolist() == expected


def test_steps_of_the_same_sequences_prepare_nothing_but_the_random_numbers_anew():
    kept = builder()
    with mock.patch.object(inputs, "prepare_sampling", wraps=prepare_sampling) as prepared:
        kept.build(step(1, 0, PARAMS, added=True))
        found = [drawn(kept, step(2 + i, 3 + i, PARAMS)) for i in range(3)]
        assert prepared.call_count == 1
    assert found[0] != found[1] != found[2]
    for i, groups in enumerate(found):
        fresh = builder()
        fresh.build(step(1, 0, PARAMS, added=True))
        fresh._sampled = inputs.NOTHING_SAMPLED
        assert drawn(fresh, step(2, 3 + i, PARAMS)) == groups


def test_a_step_of_other_sequences_is_prepared_from_the_start():
    kept = builder()
    kept.build(step(1, 0, PARAMS, added=True))
    fewer, hotter = {0: PARAMS[0]}, {**PARAMS, 0: SamplingParams(temperature=2.0)}
    with mock.patch.object(inputs, "prepare_sampling", wraps=prepare_sampling) as prepared:
        kept.build(step(2, 3, fewer))
        kept.build(step(3, 0, hotter, added=True))
        assert drawn(kept, step(4, 3, hotter))[0][1] == [[2.0]]
        assert prepared.call_count == 2
