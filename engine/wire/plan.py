"""What one engine step runs, and what came out. Sent from rank 0 to the other ranks, so only changes are in it."""

from __future__ import annotations

import msgspec

from engine.wire.messages import TokenLogprob
from engine.wire.sampling_params import SamplingParams


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """Everything a runner must know of a sequence that enters a slot; sent once, and again after preemption."""

    slot: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int


class BlockChange(msgspec.Struct, frozen=True, array_like=True):
    """The block table of `slot` holds `blocks` from entry `index` on."""

    slot: int
    index: int
    blocks: list[int]


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step. The four lists run in parallel, one entry per sequence that computes something.

    starts, counts: the step computes tokens [start, start + count) of the sequence.
    samples: True where that reaches the sequence's last token, so that a new one is sampled.
    masked: entries whose token must obey a grammar; masks: a row of bits for each, see compute_mask in grammar.py.
    """

    step: int
    added: list[NewSequence]
    blocks: list[BlockChange]
    slots: list[int]
    starts: list[int]
    counts: list[int]
    samples: list[bool]
    masked: list[int] = []
    masks: bytes = b""

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """One entry per plan entry.

    tokens: the sampled token; None where none was asked for, -1 where the logits were not finite.
    logprobs: for sequences that asked for them.
    prompt_logprobs: of the prompt tokens that follow those computed in this step, where asked for.
    """

    step: int
    tokens: list[int | None]
    logprobs: list[TokenLogprob | None]
    prompt_logprobs: list[list[TokenLogprob] | None]
