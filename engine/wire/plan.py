"""Plan and result of one engine step. Rank 0 sends the plan to the other ranks, so it only holds changes."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from engine.wire.messages import TokenLogprob
from engine.wire.multimodal import MultiModalFeatureSpec
from engine.wire.pooling_params import PoolingParams
from engine.wire.sampling_params import SamplingParams


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that enters a slot; sent once, and again after preemption."""

    slot: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    pooling: PoolingParams | None = None
    """Its hidden states are pooled; nothing is sampled."""
    images: list[MultiModalFeatureSpec] = []
    """Images of its prompt, without their pixels."""


class BlockChange(msgspec.Struct, frozen=True, array_like=True):
    """Entries of the block table of `slot` from `index` on, in one KV cache group."""

    slot: int
    index: int
    blocks: list[int]
    """In a group with a window, 0 (the null block) for each that no token to come sees."""
    cleared: list[tuple[int, int]] = []
    """Blocks, and the token of each from which on it is set to 0 before the step. Attention may multiply what is beyond
    a sequence's end by 0, and a NaN that another sequence left there would stay."""
    group: int = 0


class StateRestore(NamedTuple):
    """The sequence in `slot` resumes from a snapshot of its recurrent state, before the step."""

    slot: int
    snapshot: int


class StateSave(NamedTuple):
    """The recurrent state of the sequence in `slot` from before a position that the step reaches is kept."""

    slot: int
    position: int
    snapshot: int


class ReceivedImage(msgspec.Struct, frozen=True, array_like=True):
    """An image that an encode engine has encoded."""

    mm_hash: bytes
    blocks: list[int]
    """Where its embeddings have come."""
    num_embeds: int


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
    """True where that reaches the sequence's last token, so that a new one is sampled, or its pooling ends."""
    masked: list[int] = []
    """Entries whose tokens must obey a grammar."""
    masks: bytes = b""
    """A row of bits for each of their tokens (Grammar.masks)."""
    drafts: dict[int, list[int]] = {}
    """Guesses by entry: the last of its tokens [start, start + count), which are not known yet. A token is sampled
    after the last known one and after each of these."""
    num_drafts: int = 0
    """Tokens that a drafter with weights is to propose after this step, for each entry that samples."""
    encoded: list[MultiModalFeatureSpec] = []
    """Images that the vision encoder computes before the tokens, whose embeddings are then kept."""
    forgotten: list[bytes] = []
    """Hashes of images whose embeddings are dropped before that."""
    received: list[ReceivedImage] = []
    """Images that are copied into the encoder cache."""
    restored: list[StateRestore] = []
    saved: list[StateSave] = []
    """At most one of each sequence."""

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """One entry per plan entry."""

    step: int
    tokens: list[list[int]]
    """Sampled tokens: drafts that were accepted, and the one after them; -1 where the logits were not finite. Empty
    where none was asked for."""
    logprobs: list[list[TokenLogprob] | None]
    """One per token, for sequences that asked for them."""
    prompt_logprobs: list[list[TokenLogprob] | None]
    """Log-probabilities of the prompt tokens that follow those computed in this step, if asked for."""
    pooled: dict[int, bytes] = {}
    """Vectors and scores by entry, as in TokenDelta; empty bytes where they were not finite."""
    drafts: dict[int, list[int]] = {}
    """Tokens that may come next, by entry; from rank 0 of an engine whose drafter has weights."""
    draft_s: float = 0.0
    """Seconds that this drafter took."""
