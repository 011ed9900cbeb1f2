"""Steps before the first request: dummy steps to measure memory, and warm-up steps to compile a GPU's kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from engine.devices.device import StagedCopy
from engine.engine_options import EngineOptions
from engine.model.batch import Batch, KVGroup, split
from engine.model.models.llama import Model
from engine.model.ops import sampling
from engine.model.state import StateCache, state_specs
from engine.runner import kv_cache
from engine.runner.rank_setup import RankSetup
from engine.runner.sampler import SampledRow, SamplingInputs, UniformSource, prepare_sampling
from engine.runner.step import DummyStep
from engine.wire.plan import NewSequence, StepPlan
from engine.wire.sampling_params import SamplingParams

CONTEXTS = (128, 1024)  # tokens; for a longer context attention may use kernels that split the keys over programs
CHUNKS = (2, 64)  # tokens, for small and large tiles of attention
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.9, top_k=20),
    SamplingParams(temperature=0.0, frequency_penalty=0.1, repetition_penalty=1.1, logit_bias={0: 0.1}, logprobs=1),
)


def warm_up_plans(config: EngineOptions, max_model_len: int, vocab_size: int) -> list[StepPlan]:
    """Return plans of one decoding sequence: alone, together with a chunk of another one, and with a grammar. Their KV
    goes to block 0. Each asks for drafts, which only a drafter with weights makes."""
    plans, num_drafts = [], 2
    for i, params in enumerate(SAMPLINGS):
        context, chunk = min(CONTEXTS[i // 2], max_model_len - 1), CHUNKS[i % 2]
        chunk = min(chunk, context, config.max_num_batched_tokens - 1)
        plans.append(plan([context], [1], params, num_drafts))
        if chunk and config.max_num_seqs > 1:
            plans.append(plan([context, context], [1, chunk], params, num_drafts))
    all_allowed = b"\xff" * -(-vocab_size // 8)
    plans.append(replace(plan([1], [1], SAMPLINGS[0], num_drafts), masked=[0], masks=all_allowed))
    return plans


def plan(lengths: list[int], counts: list[int], params: SamplingParams, num_drafts: int) -> StepPlan:
    """Return a plan that computes the last counts[i] tokens of slot i, which then has lengths[i] tokens."""
    slots = list(range(len(lengths)))
    return StepPlan(
        step=0,
        added=[NewSequence(slot, [0], 1, params, seed=0) for slot in slots],
        blocks=[],
        slots=slots,
        starts=[length - count for length, count in zip(lengths, counts, strict=True)],
        counts=counts,
        samples=[True] * len(slots),
        num_drafts=num_drafts,
    )


@torch.inference_mode()
def run_dummy_step(
    setup: RankSetup,
    model: Model,
    tokens: int,
    seqs: int,
    dummy_steps: Sequence[Callable[[DummyStep], None]] = (),
) -> None:
    """Compute `tokens` tokens and sample for `seqs` sequences. All KV goes to one block of each group. dummy_steps:
    compute what parts add to such a step."""
    size, device, scaled = setup.block_size, setup.torch_device, setup.kv_dtype == torch.float8_e4m3fn
    counts = np.full(seqs, tokens // seqs)
    counts[: tokens % seqs] += 1
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    single, chunks = split(counts.tolist(), counts.tolist())
    staged = setup.device.staged_copy()
    states = state_specs(setup.model.recurrent, str(setup.dtype).removeprefix("torch."), setup.tp.size)
    table = torch.zeros(seqs, -(-int(counts.max()) // size), dtype=torch.int32, device=device)
    first, *others = [
        KVGroup(
            slot_mapping=ids % size,
            block_table=table,
            kv_cache=kv_cache.allocate(1, group, size, dtype=setup.kv_dtype, device=device, tp=setup.tp),
            kv_scales=torch.ones(len(group.layers), 2, device=device) if scaled else None,
        )
        for group in setup.model.kv_groups
    ]
    batch = Batch(
        positions=ids,
        slot_mapping=first.slot_mapping,
        query_start=staged.add(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)),
        kv_len=staged.add(counts.astype(np.int32)),
        block_table=table,
        kv_cache=first.kv_cache,
        single=staged.add(single.numpy()),
        chunks=chunks,
        kv_scales=first.kv_scales,
        other_groups=tuple(others),
        states=StateCache(states, seqs, 0, device).batch(np.arange(seqs), staged),
    )
    samplings = dummy_samplings(setup, seqs, staged)
    staged.send()
    out = model(ids, batch)
    if setup.model.head == "lm":
        sample(model, out[:seqs, : setup.model.hidden_size], samplings)
    for dummy_step in dummy_steps:
        dummy_step(DummyStep(batch, counts.tolist(), out))
    setup.device.event().wait()


def sample(model: Model, hidden: Tensor, samplings: list[SamplingInputs]) -> None:
    """Sample from hidden [seqs, hidden] in each way."""
    logits, sample_rows = model.logits(hidden), sampling.select(hidden.device)
    for inputs in samplings:
        sample_rows(logits, inputs.random)


def dummy_samplings(setup: RankSetup, seqs: int, staged: StagedCopy) -> list[SamplingInputs]:
    """Prepare to sample without filters and with them, since each has a kernel; top_p needs the most memory."""
    return [
        prepare_sampling(
            [SampledRow(0, row, SamplingParams(temperature=1.0, top_p=top_p)) for row in range(seqs)],
            setup.model.vocab_size, UniformSource(), staged.add,
        )
        for top_p in (1.0, 0.9)
    ]  # fmt: skip
