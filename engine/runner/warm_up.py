"""Steps before the first request: dummy steps to measure memory, and warm-up steps to compile a GPU's kernels."""

from __future__ import annotations

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from engine.config import EngineConfig
from engine.device import StagedCopy
from engine.model.batch import Batch, KVGroup, split
from engine.model.config_parts.vision import VisionConfig
from engine.model.models.llama import Model
from engine.model.ops import sampling
from engine.model.state import StateCache
from engine.model.transformers_backend.example_image import example_image
from engine.runner import kv_cache
from engine.runner.rank_setup import RankSetup
from engine.runner.sampler import SampledRow, SamplingInputs, UniformSource, prepare_sampling
from engine.spec_decode.drafter import DraftInputs, ModelDrafter
from engine.wire.multimodal import MultiModalFeatureSpec
from engine.wire.plan import BlockChange, NewSequence, StepPlan
from engine.wire.sampling_params import SamplingParams

CONTEXTS = (128, 1024)  # tokens; for a longer context attention may use kernels that split the keys over programs
CHUNKS = (2, 64)  # tokens, for small and large tiles of attention
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.9, top_k=20),
    SamplingParams(temperature=0.0, frequency_penalty=0.1, repetition_penalty=1.1, logit_bias={0: 0.1}, logprobs=1),
)


def warm_up_plans(
    config: EngineConfig, max_model_len: int, vision: VisionConfig | None, vocab_size: int
) -> list[StepPlan]:
    """Return plans of one decoding sequence: alone, together with a chunk of another one, and with a grammar; and plans
    of a prompt that is an image. Their KV goes to block 0."""
    plans, num_drafts = [], 2 if config.speculative_config else 0
    for i, params in enumerate(SAMPLINGS):
        context, chunk = min(CONTEXTS[i // 2], max_model_len - 1), CHUNKS[i % 2]
        chunk = min(chunk, context, config.max_num_batched_tokens - 1)
        plans.append(plan([context], [1], params, num_drafts))
        if chunk and config.max_num_seqs > 1:
            plans.append(plan([context, context], [1, chunk], params, num_drafts))
    all_allowed = b"\xff" * -(-vocab_size // 8)
    plans.append(replace(plan([1], [1], SAMPLINGS[0], num_drafts), masked=[0], masks=all_allowed))
    if vision is not None:
        plans += image_plans(example_image(vision, 1), vision.image_token_id, config, max_model_len)
    return plans


def image_plans(
    image: MultiModalFeatureSpec, token_id: int, config: EngineConfig, max_model_len: int
) -> list[StepPlan]:
    """Return a plan of a prompt that is one image, and a plan that forgets the image; no plans if the image is too
    long."""
    count = image.num_embeds
    if count > min(config.max_num_batched_tokens, config.encoder_cache_size, max_model_len - 1):
        return []
    encodes, forgets = plan([count], [count], SAMPLINGS[0], 0), plan([1], [1], SAMPLINGS[0], 0)
    encodes.added[0] = NewSequence(0, [token_id] * count, count, SAMPLINGS[0], seed=0, images=[image])
    encodes.encoded.append(image)
    forgets.forgotten.append(image.mm_hash)
    return [encodes, forgets]


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
    kv_scales: list[Tensor | None],
    tokens: int,
    seqs: int,
    drafter: ModelDrafter | None = None,
) -> None:
    """Compute `tokens` tokens, sample for `seqs` sequences and let the drafter propose. All KV goes to one block of
    each group."""
    size, device = setup.block_size, setup.torch_device
    counts = np.full(seqs, tokens // seqs)
    counts[: tokens % seqs] += 1
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    single, chunks = split(counts.tolist(), counts.tolist())
    staged = setup.device.staged_copy()
    table = torch.zeros(seqs, -(-int(counts.max()) // size), dtype=torch.int32, device=device)
    first, *others = [
        KVGroup(
            slot_mapping=ids % size,
            block_table=table,
            kv_cache=kv_cache.allocate(1, group, size, dtype=setup.kv_dtype, device=device, tp=setup.tp),
            kv_scales=scales,
        )
        for group, scales in zip(setup.model.kv_groups, kv_scales, strict=True)
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
        states=StateCache(setup.state_specs, seqs, 0, device).batch(np.arange(seqs), staged),
    )
    if setup.model.head != "lm":
        staged.send()
        model(ids, batch)
        setup.device.event().wait()
        return
    samplings = dummy_samplings(setup, seqs, staged)
    staged.send()
    out = model(ids, batch)
    logits = model.logits(out[:seqs, : setup.model.hidden_size])
    sample_rows = sampling.select(device)
    for inputs in samplings:
        sample_rows(logits, inputs.random)
    if drafter is not None:
        del logits  # the drafter runs after sampling
        run_dummy_drafts(setup, drafter, batch, counts.tolist(), out)
    setup.device.event().wait()


def dummy_samplings(setup: RankSetup, seqs: int, staged: StagedCopy) -> list[SamplingInputs]:
    """Prepare to sample without filters and with them, since each has a kernel; top_p needs the most memory."""
    return [
        prepare_sampling(
            [SampledRow(0, 0, 0, row, SamplingParams(temperature=1.0, top_p=top_p)) for row in range(seqs)],
            setup.model.vocab_size, UniformSource(), staged.add,
        )
        for top_p in (1.0, 0.9)
    ]  # fmt: skip


def run_dummy_drafts(setup: RankSetup, drafter: ModelDrafter, batch: Batch, counts: list[int], out: Tensor) -> None:
    """Propose for every sequence. All block tables name one KV block in all places. counts: tokens of each sequence."""
    assert setup.config.speculative_config is not None
    drafter.allocate(1)
    table, size = batch.block_table, setup.model.hidden_size
    step_plan = plan(counts, counts, SAMPLINGS[0], setup.config.speculative_config.num_speculative_tokens)
    step_plan.blocks.extend(BlockChange(slot, 0, [0] * table.shape[1]) for slot in step_plan.slots)
    drafter.follow(step_plan)
    step = DraftInputs(
        plan=step_plan,
        entries=step_plan.slots,
        batch=batch,
        tables=table,
        next_ids=torch.zeros_like(batch.positions),
        last_rows=batch.query_start[1:].long() - 1,
        hidden=out[:, :size],
        aux_hidden=out[:, size:] if out.shape[1] > size else None,
        history=torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32, device=out.device),
    )
    drafter.propose(step)
