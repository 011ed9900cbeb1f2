"""Plan and result of one engine step. Rank 0 sends the plan to the other ranks, so it contains only changes."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from engine.wire.part_record import Attached, R, attached
from engine.wire.sampling_params import SamplingParams
from engine.wire.token_delta import TokenLogprob


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that enters a slot; sent once, and again after preemption."""

    slot: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    parts: Attached = {}
    """What parts tell their ends on the ranks of it."""

    def record(self, kind: type[R]) -> R | None:
        return attached(self.parts, kind)


class BlockChange(msgspec.Struct, frozen=True, array_like=True):
    """New entries in the block table of `slot`, from `index` on, in one KV cache group."""

    slot: int
    index: int
    blocks: list[int]
    """Block ids; in a group with a window, 0 (the null block) for each block that no future token attends to."""
    cleared: list[tuple[int, int]] = []
    """(block, first token in it) to set to 0 from that token on before the step. Attention may multiply values beyond
    the sequence's end by 0, and a NaN that another sequence left there would persist."""
    group: int = 0


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step. `slots`, `starts`, `counts` and `samples` are parallel: one entry per sequence that computes tokens."""

    step: int
    added: list[NewSequence]
    blocks: list[BlockChange]
    slots: list[int]
    starts: list[int]
    counts: list[int]
    """The step computes tokens [start, start + count) of the sequence."""
    samples: list[bool]
    """True where the step computes the sequence's last token. A new token is then sampled, or pooling ends."""
    masked: list[int] = []
    """Indices of the entries whose tokens must obey a grammar."""
    masks: bytes = b""
    """One row of bits for each sampled token of the masked entries (Grammar.masks)."""
    drafts: dict[int, list[int]] = {}
    """Draft tokens by entry. They are guesses for the unknown tokens at the end of [start, start + count). A token is
    sampled after the last known token and after each draft. ON_DEVICE for a draft that the drafter has proposed after
    the sequence's newest token, and that the host does not know."""
    num_drafts: int = 0
    """Tokens that a drafter with weights proposes at the end of this step, for each entry that samples."""
    parts: Attached = {}
    """What parts tell their ends on the ranks before the step."""

    def record(self, kind: type[R]) -> R | None:
        return attached(self.parts, kind)

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


class SampledStep(NamedTuple):
    """The tokens of a step for ranks that have not sampled them; as in StepResult."""

    step: int
    tokens: list[list[int]]


ALL_TOKENS_BANNED = -2
ON_DEVICE = -3


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """Result of one step. Each list has one item per entry of the plan."""

    step: int
    tokens: list[list[int]]
    """Sampled tokens: the accepted drafts and the token after them; -1 where the logits were not finite, and
    ALL_TOKENS_BANNED where the request's parameters allow no token. Empty where the plan asked for none."""
    logprobs: list[list[TokenLogprob] | None]
    """One per sampled token, for sequences that asked for them."""
    prompt_logprobs: list[list[TokenLogprob] | None]
    """Log-probabilities of the prompt tokens that follow the tokens computed in this step, if asked for."""
    answers: dict[int, bytes] = {}
    """Answers of parts by entry, as in TokenDelta; empty bytes where numbers were not finite."""
    drafts: dict[int, list[int]] = {}
    """Tokens proposed to come next, by entry, by a drafter with weights. ON_DEVICE for tokens that stay on the
    device."""
    draft_s: float = 0.0
    """Seconds that the drafter with weights took."""
    stage: int = 0
    """Number of the pipeline stage that sends this. Only the result of the last stage has tokens."""
    busy_s: float = 0.0
    """Seconds since the start in which this stage computed, up to the step before."""
    drafts_first: bool = False
    """Whether the drafter of the step before ran on after that step's result; `draft_s` includes its seconds."""
