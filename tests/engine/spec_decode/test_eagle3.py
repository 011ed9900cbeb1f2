"""EAGLE-3 heads: their drafts are those of transformers' layers over whole sequences, without a cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.errors import ConfigError, ModelFolderError
from engine.spec_decode.eagle3 import eagle3_drafter
from engine.spec_decode.head_drafter import HeadDrafter
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

MODEL_OPTIMIZER = {  # the fields of https://github.com/NVIDIA/Model-Optimizer, as it exports them
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": None,
}
PUBLISHERS = {  # fields beside the layer's shape, with the layers of a target of 8 layers whose inputs the head reads
    "authors": (
        {"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "pad_token_id": 0, "pretraining_tp": 1,
         "tie_word_embeddings": False, "torch_dtype": "float16", "initializer_range": 0.02},
        (2, 4, 5),
    ),
    "AngelSlim": (
        {"attention_bias": False, "attention_dropout": 0.0, "max_window_layers": 36, "rope_scaling": None,
         "rope_theta": 10000, "sliding_window": None, "use_cache": True, "use_sliding_window": False,
         "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
        (2, 4, 5),
    ),
    "SpecForge": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}},
        (2, 4, 5),
    ),
    "Model Optimizer": (
        {"eagle_config": {**MODEL_OPTIMIZER, "eagle_aux_hidden_state_layer_ids": [0, 3, 5]}},
        (1, 4, 6),
    ),
}  # fmt: skip


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


@pytest.mark.parametrize("publisher", PUBLISHERS)
def test_heads_of_every_publisher_read_the_layers_that_they_were_trained_on(publisher, tmp_path, target):
    fields, layers = PUBLISHERS[publisher]
    head = PlainEagle3(norm_before_residual=False, draft_vocab=DRAFT_VOCAB)
    head.embed_tokens.weight.data.copy_(target.model.embed_tokens.weight)
    drafter = eagle3_drafter(write_authors(tmp_path, head, **fields), target)
    assert drafter.aux_layers == layers
    generator = torch.Generator().manual_seed(2)
    tokens, aux = list(range(10, 20)), torch.randn(10, 3 * HIDDEN, generator=generator)
    sequences = DraftedSequences(drafter, [tokens], [torch.zeros(10, HIDDEN)], [aux])
    assert dict(sequences.step({0: 7}, 3)) == {0: head.drafts(tokens[:8], aux, 3)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 96}, f"made for a vocabulary of size {VOCAB}"),
        ({"target_hidden_size": 64}, "made for hidden states of size 48"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}, "made for a target of 8 layers"),
        ({"norm_before_fc": True}, "an EAGLE-3 head with norm_before_fc false instead of true"),
        (
            {"eagle_config": {**MODEL_OPTIMIZER, "use_aux_hidden_state": False}},
            "with use_aux_hidden_state true instead of false",
        ),
        (
            {"eagle_config": {**MODEL_OPTIMIZER, "use_mtp_layernorm": True}},
            "with use_mtp_layernorm false instead of true",
        ),
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


@pytest.mark.parametrize(("heads", "alike"), [(4, True), (2, False)])
def test_a_head_reads_the_targets_tiles_only_if_its_own_would_have_as_many_rows(heads, alike, tmp_path, target):
    layers = replace(target.config, num_heads=heads, num_layers=1)
    drafter = HeadDrafter(None, layers, target)
    drafter.allocate(1)
    assert (drafter.first_pass(8) is not None) == alike
