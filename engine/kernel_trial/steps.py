"""The steps of a trial: chunks of prompts, then sequences that decode together, with lengths that differ."""

from __future__ import annotations

import random
from collections.abc import Iterator

from engine.model.kv_groups import KVCacheGroup
from engine.wire.plan import BlockChange, NewSequence, StepPlan
from engine.wire.sampling_params import SamplingParams

SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, top_p=0.9, top_k=20),
    SamplingParams(temperature=1.0, frequency_penalty=0.1, repetition_penalty=1.1),
)
PROMPTS = (150, 70, 5)  # tokens
CHUNKS: tuple[dict[int, int], ...] = ({0: 100}, {0: 50, 1: 70}, {0: 1, 1: 1, 2: 2}, {0: 1, 1: 1, 2: 3})
"""How many tokens each sequence computes in the first steps."""
DECODES = ((0, 1, 2), (0, 1, 2), (1,), (1,))  # the sequences of the other steps


def most_tokens() -> int:
    """Return the length of the longest sequence of a trial, and one more."""
    return PROMPTS[0] + len(CHUNKS) + len(DECODES) + 1


def trial_plans(
    vocab_size: int, groups: tuple[KVCacheGroup, ...], block_size: int, adapters: bool
) -> Iterator[StepPlan]:
    """Return the plans in order. Each sequence has all its blocks from its first step on. adapters: whether sequences
    but the second use the adapter in slot 0."""
    rng, done = random.Random(0), dict.fromkeys(range(len(PROMPTS)), 0)
    width = -(-most_tokens() // block_size)
    for step, counts in enumerate((*CHUNKS, *(dict.fromkeys(seqs, 1) for seqs in DECODES))):
        new = [slot for slot in counts if not done[slot]]
        yield StepPlan(
            step=step,
            added=[
                NewSequence(
                    slot, [rng.randrange(vocab_size) for _ in range(PROMPTS[slot])], PROMPTS[slot], SAMPLINGS[slot],
                    seed=slot, adapter=0 if adapters and slot != 1 else -1,
                )
                for slot in new
            ],
            blocks=[
                BlockChange(slot, 0, [1 + slot * width + i for i in range(width)], group=group)
                for slot in new
                for group in range(len(groups))
            ],
            slots=list(counts),
            starts=[done[slot] for slot in counts],
            counts=list(counts.values()),
            samples=[done[slot] + count >= PROMPTS[slot] for slot, count in counts.items()],
        )  # fmt: skip
        for slot, count in counts.items():
            done[slot] += count


def num_blocks(block_size: int) -> int:
    """Return how many blocks the sequences of a trial need in each group, the null block included."""
    return 1 + len(PROMPTS) * -(-most_tokens() // block_size)
