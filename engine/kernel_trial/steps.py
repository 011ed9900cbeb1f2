"""The steps of a trial: chunks of prompts, then sequences that decode together, with lengths that differ, one of them
with a grammar's mask."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from engine.kernel_trial.tried_part import TriedPart, tried_parts
from engine.model.kv_groups import KVCacheGroup
from engine.wire.parts.states import StateStep
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


MASKED = 0  # the sequence that has a grammar as it decodes


def most_tokens() -> int:
    """Return the length of the longest sequence of a trial, and one more."""
    return PROMPTS[0] + len(CHUNKS) + len(DECODES) + 1


def compute_steps(runner: Any) -> tuple[list[int], int, int]:
    """Compute all steps with a ModelRunner. Returns the tokens that were sampled, the number of steps, and how many of
    them were replayed graphs."""
    for tensor in memory_of(runner):
        tensor.zero_()  # what no sequence writes is compared too
    groups, vocab_size = runner.model_config.kv_groups, runner.model_config.vocab_size
    tokens: list[int] = []
    steps = replays = 0
    for plan in trial_plans(vocab_size, groups, runner.block_size, tried_parts(runner)):
        inputs = runner.prepare(plan)
        result = runner.collect(runner.launch(inputs))
        tokens += [token for sampled in result.tokens for token in sampled]
        steps, replays = steps + 1, replays + (not inputs.prepared.needs_batch)
    return tokens, steps, replays


def memory_of(runner: Any) -> list[Tensor]:
    """Return the KV caches and states of a ModelRunner."""
    states = runner.memory.of.get(StateStep.part)
    layers = [] if states is None else states.layers
    return [*runner.kv_caches, *(tensor for layer in layers for tensor in layer.values())]


def trial_plans(
    vocab_size: int, groups: tuple[KVCacheGroup, ...], block_size: int, parts: Sequence[TriedPart] = ()
) -> Iterator[StepPlan]:
    """Return the plans in order. Each sequence has all its blocks from its first step on. parts: of the rank, which
    all sequences but the second use."""
    rng, done = random.Random(0), dict.fromkeys(range(len(PROMPTS)), 0)
    used = [part.use() for part in parts]
    width = -(-most_tokens() // block_size)
    for step, counts in enumerate((*CHUNKS, *(dict.fromkeys(seqs, 1) for seqs in DECODES))):
        decoding = counts if step >= len(CHUNKS) else {}
        new = [slot for slot in counts if not done[slot]]
        yield StepPlan(
            step=step,
            added=[
                NewSequence(
                    slot, [rng.randrange(vocab_size) for _ in range(PROMPTS[slot])], PROMPTS[slot], SAMPLINGS[slot],
                    seed=slot, parts={each.part: each for each in used} if slot != 1 else {},
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
            masked=[entry for entry, slot in enumerate(counts) if slot == MASKED and slot in decoding],
            masks=rng.randbytes(-(-vocab_size // 8)) if MASKED in decoding else b"",
        )  # fmt: skip
        for slot, count in counts.items():
            done[slot] += count


def num_blocks(block_size: int) -> int:
    """Return how many blocks the sequences of a trial need in each group, the null block included."""
    return 1 + len(PROMPTS) * -(-most_tokens() // block_size)
