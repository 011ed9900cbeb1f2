"""Steps that an engine on a GPU computes before its first request, since the first of each kind compiles kernels."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.wire.plan import NewSequence, StepPlan
from engine.wire.sampling_params import SamplingParams

CONTEXTS = (128, 1024)  # tokens; attention has other kernels for keys that it may split over programs
CHUNKS = (2, 64)  # tokens, for small and large tiles of attention
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.9, top_k=20),
    SamplingParams(temperature=0.0, frequency_penalty=0.1, repetition_penalty=1.1, logit_bias={0: 0.1}, logprobs=1),
)


def warm_up_plans(config: EngineConfig, max_model_len: int) -> list[StepPlan]:
    """Return steps of one sequence that decodes, without and with a chunk beside it. Their KV goes to block 0."""
    plans, num_drafts = [], 2 if config.speculative else 0
    for i, params in enumerate(SAMPLINGS):
        context, chunk = min(CONTEXTS[i // 2], max_model_len - 1), CHUNKS[i % 2]
        chunk = min(chunk, context, config.max_num_batched_tokens - 1)
        plans.append(plan([context], [1], params, num_drafts))
        if chunk and config.max_num_seqs > 1:
            plans.append(plan([context, context], [1, chunk], params, num_drafts))
    return plans


def plan(lengths: list[int], counts: list[int], params: SamplingParams, num_drafts: int) -> StepPlan:
    """Return a step at whose end slot i has lengths[i] tokens, of which it computed counts[i]."""
    slots = list(range(len(lengths)))
    added = [NewSequence(slot, [0], 1, params, seed=0) for slot in slots]
    starts = [length - count for length, count in zip(lengths, counts, strict=True)]
    return StepPlan(0, added, [], slots, starts, counts, [True] * len(slots), num_drafts=num_drafts)
