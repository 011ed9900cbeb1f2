"""Layers for multi-token prediction, against transformers' layer over whole sequences."""

from __future__ import annotations

import pytest
import torch

from engine.errors import ConfigError, ModelFolderError
from engine.spec_decode.mtp import mtp_drafter
from tests.engine.spec_decode.draft_checkpoints import HIDDEN, VOCAB, write_mtp
from tests.engine.spec_decode.draft_steps import DraftedSequences, load_target
from tests.models import make_model


@pytest.fixture(scope="module", params=["glm4_moe", "deepseek_v3", "qwen3_next", "qwen3_5"])
def checkpoint(request, tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("target"), request.param, vocab_size=VOCAB)
    return folder, write_mtp(folder)


def test_drafts_are_those_of_transformers_layer(checkpoint):
    folder, head = checkpoint
    drafter = mtp_drafter(load_target(folder))
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(VOCAB, (30,), generator=generator).tolist() for _ in range(2)]
    hidden = [torch.randn(30, HIDDEN, generator=generator) for _ in range(2)]
    sequences = DraftedSequences(drafter, tokens, hidden, None)
    for counts, num_drafts, wrong in (({0: 6}, 3, {}), ({0: 1, 1: 9}, 4, {0: [7, 8]}), ({0: 3, 1: 1}, 2, {})):
        for slot, drafts in sequences.step(counts, num_drafts, wrong):
            assert drafts == head.drafts(tokens[slot][: sequences.known[slot] + 1], hidden[slot], num_drafts)


def test_a_model_without_such_a_layer_is_refused(tmp_path):
    for family, reason in (
        ("llama", "LlamaForCausalLM, which has no layer that predicts"),
        ("mimo_v2_flash", "MiMoV2FlashForCausalLM, whose layers for it cannot be computed yet"),
    ):
        with pytest.raises(ConfigError, match=f"a method other than mtp for {reason}"):
            mtp_drafter(load_target(make_model(tmp_path / family, family)))


def test_a_checkpoint_without_the_tensors_of_the_layer_is_refused(tmp_path):
    folder = make_model(tmp_path, "glm4_moe", num_nextn_predict_layers=1)
    with pytest.raises(ModelFolderError, match=r"missing tensors: .*eh_proj"):
        mtp_drafter(load_target(folder))
