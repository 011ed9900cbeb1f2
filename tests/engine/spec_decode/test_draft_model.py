"""A draft model, beside transformers' greedy continuation."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.errors import ConfigError
from engine.spec_decode.draft_model import DraftModel
from tests.engine.spec_decode.draft_steps import DraftedSequences, load_target
from tests.models import make_model

HIDDEN, VOCAB = 48, 97


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("target"), "qwen3", max_position_embeddings=64)


@pytest.fixture(scope="module")
def target(folder):
    return load_target(folder)


def sequences_of(drafter, count: int = 2) -> DraftedSequences:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(VOCAB, (40,), generator=generator).tolist() for _ in range(count)]
    return DraftedSequences(drafter, tokens, [torch.zeros(40, HIDDEN) for _ in tokens], None)


def continuation(folder, tokens: list[int], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for _ in range(count):
        tokens = [*tokens, int(model(torch.tensor([tokens])).logits[0, -1].argmax())]
    return tokens[len(tokens) - count :]


def test_drafts_continue_each_sequence_greedily(folder, target):
    sequences = sequences_of(DraftModel(folder, target, 64))
    for counts, num_drafts, wrong in (
        ({0: 6}, 3, {}),
        ({1: 9, 0: 1}, 4, {0: [7, 8, 9]}),
        ({0: 3, 1: 1}, 2, {1: [1]}),
        ({0: 1, 1: 1}, 0, {}),
        ({0: 1, 1: 1}, 3, {}),
    ):
        for slot, drafts in sequences.step(counts, num_drafts, wrong):
            assert drafts == continuation(folder, sequences.tokens[slot][: sequences.known[slot] + 1], num_drafts)


def test_a_prompt_whose_kv_came_from_elsewhere_is_caught_up_with_over_several_steps(folder, target):
    sequences = sequences_of(DraftModel(folder, target, 10), count=1)
    sequences.known[0] = 25  # cached, or received
    steps = [next(sequences.step({0: 1}, 2, added={0}))[1] for _ in range(4)]
    assert steps[:2] == [[-1, -1]] * 2
    assert steps[2] == continuation(folder, sequences.tokens[0][:29], 2)
    assert steps[3] == continuation(folder, sequences.tokens[0][:30], 2)


def test_a_slot_that_is_given_to_another_sequence_starts_over(folder, target):
    sequences = sequences_of(DraftModel(folder, target, 64))
    list(sequences.step({0: 20}, 2))
    sequences.tokens[0], sequences.known[0] = sequences.tokens[1], 0
    assert next(sequences.step({0: 12}, 3))[1] == continuation(folder, sequences.tokens[1][:13], 3)


def test_no_draft_goes_beyond_the_blocks_of_a_sequence(folder, target):
    sequences = sequences_of(DraftModel(folder, target, 64), count=1)
    plenty = next(sequences.step({0: 6}, 5))[1]
    sequences.known[0] = 0
    assert next(sequences.step({0: 6}, 5, room=2))[1] == [*plenty[:2], -1, -1, -1]


def test_a_model_of_another_vocabulary_is_refused(tmp_path, target):
    with pytest.raises(ConfigError, match="made for a vocabulary of size 97"):
        DraftModel(make_model(tmp_path, "llama", vocab_size=96), target, 64)


def test_a_model_whose_layers_keep_a_state_is_refused(tmp_path, target):
    with pytest.raises(ConfigError, match="whose layers all keep KV of one shape"):
        DraftModel(make_model(tmp_path, "qwen3_5"), target, 64)


def test_tokens_of_steps_without_drafts_are_computed_when_drafts_are_wanted_again(folder, target):
    sequences = sequences_of(DraftModel(folder, target, 64), count=1)
    list(sequences.step({0: 6}, 3))
    list(sequences.step({0: 1}, 3, {0: [7, 8, 9]}))  # their KV is wrong
    for _ in range(6):
        list(sequences.step({0: 1}, 0))
    assert next(sequences.step({0: 1}, 4))[1] == continuation(folder, sequences.tokens[0][:15], 4)
