"""EAGLE-3 heads: their drafts are those of transformers' layers over whole sequences, without a cache."""

from __future__ import annotations

import pytest
import torch

from engine.errors import ConfigError, ModelFolderError
from engine.spec_decode.eagle3 import eagle3_drafter
from tests.engine.spec_decode.draft_checkpoints import (
    DRAFT_VOCAB,
    HIDDEN,
    VOCAB,
    PlainEagle3,
    write_authors,
    write_speculators,
)
from tests.engine.spec_decode.draft_steps import DraftedSequences, load_target
from tests.models import make_model


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(make_model(tmp_path_factory.mktemp("target"), "llama", vocab_size=VOCAB, num_hidden_layers=8))


@pytest.mark.parametrize("form", ["authors", "speculators"])
def test_drafts_are_those_of_a_plain_head_whatever_steps_the_target_takes(form, tmp_path, target):
    generator = torch.Generator().manual_seed(1)
    if form == "authors":
        head = PlainEagle3(norm_before_residual=False, draft_vocab=DRAFT_VOCAB)
        head.embed_tokens.weight.data.copy_(target.model.embed_tokens.weight)
        drafter = eagle3_drafter(write_authors(tmp_path, head), target)
        assert drafter.aux_layers == (2, 4, 5)
    else:
        head = PlainEagle3(norm_before_residual=True, draft_vocab=VOCAB)
        drafter = eagle3_drafter(write_speculators(tmp_path, head), target)
        assert drafter.aux_layers == (0, 2, 5)
    tokens = [torch.randint(VOCAB, (30,), generator=generator).tolist() for _ in range(2)]
    aux = [torch.randn(30, 3 * HIDDEN, generator=generator) for _ in range(2)]
    hidden = [torch.zeros(30, HIDDEN) for _ in range(2)]
    sequences = DraftedSequences(drafter, tokens, hidden, aux)
    for counts, num_drafts, wrong in (
        ({0: 7}, 4, {}),
        ({0: 1, 1: 5}, 3, {0: [1, 2, 3]}),
        ({1: 6, 0: 3}, 0, {}),
        ({0: 1, 1: 1}, 5, {1: [4]}),
        ({1: 2}, 1, {}),
    ):
        for slot, drafts in sequences.step(counts, num_drafts, wrong):
            known = sequences.known[slot]
            assert drafts == head.drafts(tokens[slot][: known + 1], aux[slot], num_drafts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 96}, f"made for a vocabulary of size {VOCAB}"),
        ({"target_hidden_size": 64}, "made for hidden states of size 48"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}, "made for a target of 8 layers"),
        ({"norm_before_fc": True}, "an EAGLE-3 head without norm_before_fc"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(changes, message, tmp_path, target):
    write_authors(tmp_path, PlainEagle3(False, DRAFT_VOCAB), **changes)
    with pytest.raises(ConfigError, match=message):
        eagle3_drafter(tmp_path, target)


def test_a_checkpoint_of_another_width_is_refused_by_its_tensors(tmp_path, target):
    write_authors(tmp_path, PlainEagle3(False, DRAFT_VOCAB), intermediate_size=96)
    with pytest.raises(ModelFolderError, match=r"down_proj.weight has shape \[48, 80\]"):
        eagle3_drafter(tmp_path, target)
