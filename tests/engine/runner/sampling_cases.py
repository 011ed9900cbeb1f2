"""Sequences about to be sampled, over a small vocabulary: logits, histories, and everything that may be asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from engine.runner.sampler import SampledRow
from engine.wire.part_record import encoded
from engine.wire.parts.thinking_budget import ThinkingBudget
from engine.wire.sampling_params import SamplingParams

VOCAB = 12
EOS = frozenset({2})
# all different, as top_k=1 and greedy must agree, and not in order
LOGITS = torch.tensor([0.3, -1.0, 2.0, 1.1, -2.5, 0.9, 1.7, -0.2, 0.0, 2.4, -0.7, 0.5])

FILTERS = {
    "temperature 1": {},
    "low temperature": {"temperature": 0.8},
    "high temperature": {"temperature": 2.0},
    "top_k": {"top_k": 4},
    "top_k of the whole vocabulary": {"top_k": VOCAB},
    "top_p": {"top_p": 0.7},
    "top_p that leaves almost everything": {"top_p": 0.99},
    "min_p": {"min_p": 0.2},
    "top_k and top_p": {"top_k": 6, "top_p": 0.8},
    "top_k and min_p": {"top_k": 5, "min_p": 0.35},
    "top_p and min_p": {"top_p": 0.9, "min_p": 0.1},
    "all": {"top_k": 7, "top_p": 0.85, "min_p": 0.08, "temperature": 1.3},
}


@dataclass
class Sequence:
    """One row with its own logits and history."""

    params: SamplingParams
    seed: int
    tokens: list[int]
    num_prompt: int
    logits: Tensor

    @property
    def row(self) -> SampledRow:
        return SampledRow(len(self.tokens), self.seed, self.params)


def history_of(sequences: list[Sequence], slots: list[int]) -> Tensor:
    """[8, 16] int32. What is beyond a sequence is another's, and says nothing of it."""
    history = torch.full((8, 16), 11, dtype=torch.int32)
    for slot, sequence in zip(slots, sequences, strict=True):
        history[slot, : len(sequence.tokens)] = torch.tensor(sequence.tokens, dtype=torch.int32)
    return history


token_ids = st.integers(0, VOCAB - 1)
edits = st.fixed_dictionaries(
    {},
    optional={
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.25, 4),
        "logit_bias": st.dictionaries(token_ids, st.floats(-100, 100), max_size=4),
        "allowed_token_ids": st.lists(token_ids, min_size=1, max_size=6),
        "bad_words_token_ids": st.lists(st.lists(token_ids, min_size=1, max_size=3), max_size=4),
        "min_tokens": st.integers(0, 8),
        "stop_token_ids": st.lists(token_ids, max_size=3),
        "extra_args": st.builds(ThinkingBudget, st.integers(0, 6), token_ids, st.none() | token_ids).map(encoded),
    },
)
filters = st.sampled_from([{"temperature": 0.0}, {"temperature": 0.0, "top_k": 3}, *FILTERS.values()])
# quarters are exact in float32, so that the same sums come out in any order
logit_rows = st.lists(st.integers(-20, 20), min_size=VOCAB, max_size=VOCAB)


@st.composite
def sequences(draw_from) -> Sequence:
    tokens = draw_from(st.lists(token_ids, min_size=1, max_size=14))
    extras = draw_from(st.one_of(st.just({}), edits))
    logits = torch.tensor(draw_from(logit_rows), dtype=torch.float32) / 4
    if draw_from(st.integers(0, 9)) == 0:
        logits[draw_from(token_ids)] = draw_from(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    return Sequence(
        params=SamplingParams(max_tokens=None, **draw_from(filters), **extras),
        seed=draw_from(st.integers(0, 2**64 - 1)),
        tokens=tokens,
        num_prompt=draw_from(st.integers(1, len(tokens))),
        logits=logits,
    )
