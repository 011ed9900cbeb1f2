"""Medusa heads against the formula of the paper, in both formats of checkpoints."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.errors import ConfigError, ModelFolderError
from engine.spec_decode.medusa import MedusaDrafter
from tests.engine.spec_decode.draft_checkpoints import HEADS, HIDDEN, VOCAB, write_heads
from tests.engine.spec_decode.draft_steps import DraftedSequences, load_target
from tests.models import make_model


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(make_model(tmp_path_factory.mktemp("target"), "llama", vocab_size=VOCAB))


@pytest.mark.parametrize(("form", "layers"), [("authors", 1), ("vllm", 2), ("shared", 1)])
def test_each_head_guesses_from_the_hidden_state_of_the_newest_token_but_one(form, layers, tmp_path, target):
    residual, outputs = write_heads(tmp_path, form, layers)
    drafter = MedusaDrafter(tmp_path, target, HEADS)
    tokens, hidden = [list(range(20)), list(range(30, 50))], [torch.randn(20, HIDDEN) for _ in range(2)]
    sequences = DraftedSequences(drafter, tokens, hidden, None)
    for counts, num_drafts, wrong in (({0: 7, 1: 1}, 3, {}), ({1: 1, 0: 1}, 2, {0: [5, 6]}), ({0: 1}, 0, {})):
        for slot, drafts in sequences.step(counts, num_drafts, wrong):
            expected = []
            for head in range(num_drafts):
                x = hidden[slot][sequences.known[slot] - 1]
                for weight, bias in residual[head]:
                    x = x + F.silu(F.linear(x, weight, bias))
                logits = F.linear(x, outputs[head]) if outputs else target.model.logits(x[None])[0]
                expected.append(int(logits.argmax()))
            assert drafts == expected


@pytest.mark.parametrize(
    ("changes", "num_tokens", "message"),
    [
        ({"vocab_size": 96}, 3, f"made for a vocabulary of size {VOCAB}"),
        ({"hidden_size": 64}, 3, "made for hidden states of size 48"),
        ({"truncated_vocab_size": 50}, 3, f"heads for all {VOCAB} tokens; these are for 50"),
        ({}, 4, "num_speculative_tokens must be at most 3, the number of heads"),
    ],
)
def test_heads_that_do_not_fit_are_refused_by_name(changes, num_tokens, message, tmp_path, target):
    write_heads(tmp_path, "vllm", **changes)
    with pytest.raises(ConfigError, match=message):
        MedusaDrafter(tmp_path, target, num_tokens)


def test_a_head_that_is_missing_is_named(tmp_path, target):
    write_heads(tmp_path, "vllm", num_heads=4)
    with pytest.raises(ModelFolderError, match=r"blocks\.3\.layers\.0\.weight"):
        MedusaDrafter(tmp_path, target, 3)
