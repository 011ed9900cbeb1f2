from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.distributed.tp_group import TPGroup
from engine.errors import ModelFolderError
from engine.model import loader
from engine.model.config import ModelConfig
from engine.model.loader import load_weights
from engine.model.models.llama import LlamaForCausalLM
from engine.model.models.registry import build_model
from engine.model.noise import fill_with_noise
from engine.model.shard import ShardPlan
from tests.models import FAMILIES, make_model
from tests.transformers_models import make_transformers_model


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Every parameter starts as NaN, so that one that is not filled shows."""
    model = build_model(ModelConfig.from_folder(folder), ShardPlan(), dtype, "cpu")
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    load_weights(model, folder, TPGroup.single())
    return model


def rewrite(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Replace, add or (None) drop tensors of the checkpoint."""
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_loading_fills_every_parameter(tmp_path, family):
    for name, parameter in load(make_model(tmp_path, family)).named_parameters():
        assert parameter.isfinite().all(), name


def test_merged_parameters_hold_their_parts_in_order(tmp_path):
    folder = make_model(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    layer = load(folder).layers[1]
    for merged, parent, parts in (("qkv_proj", "self_attn", "qkv"), ("gate_up_proj", "mlp", ("gate", "up"))):
        whole = torch.cat([tensors[f"model.layers.1.{parent}.{part}_proj.weight"] for part in parts])
        assert torch.equal(layer.get_submodule(f"{parent}.{merged}").weight, whole)


def test_weights_are_converted_to_the_dtype_asked_for(tmp_path):
    folder = make_model(tmp_path, "qwen2")
    model = load(folder, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    expected = load_file(folder / "model.safetensors")["model.norm.weight"].bfloat16()
    assert torch.equal(model.norm.weight, expected)


def test_a_checkpoint_in_several_files_loads_by_its_index_and_other_files_are_ignored(tmp_path):
    folder = make_model(tmp_path / "one", "llama")
    whole = load(folder)
    split = tmp_path / "split"
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    reference.save_pretrained(split, max_shard_size="60KB")
    save_file({"other": torch.zeros(1)}, split / "consolidated.safetensors")
    assert len(list(split.glob("model-*.safetensors"))) > 1
    for ours, expected in zip(load(split).parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model.norm.weight": None}, "1 missing tensors: model.norm.weight"),
        (
            {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)},
            "unexpected tensors: model.layers.0.self_attn.q_norm",
        ),
        ({"model.norm.weight": torch.ones(47)}, "model.norm.weight has shape [47], config.json asks for [48]"),
        ({"model.layers.2.self_attn.k_proj.weight": None}, "missing tensors: model.layers.2.self_attn.k_proj.weight"),
        ({"lm_head.weight": None}, "missing tensors: lm_head.weight"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_the_tensors_name(tmp_path, changes, problem):
    folder = make_model(tmp_path, "llama")
    rewrite(folder, changes)
    with pytest.raises(ModelFolderError, match=re.escape(problem)):
        load(folder)


def test_many_missing_tensors_are_counted_and_not_all_listed(tmp_path):
    folder = make_model(tmp_path, "llama")
    names = [name for name in load_file(folder / "model.safetensors") if ".layers.1." in name]
    rewrite(folder, dict.fromkeys(names))
    with pytest.raises(ModelFolderError, match=r"9 missing tensors: .* and 4 more"):
        load(folder)


def test_a_tensor_that_two_files_hold_is_refused(tmp_path):
    folder = make_model(tmp_path, "llama")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"model.norm.weight": torch.ones(48)}, folder / "b.safetensors")
    with pytest.raises(ModelFolderError, match=r"1 duplicate tensors: model\.norm\.weight"):
        load(folder)


def test_a_copy_of_a_tied_head_and_old_rotary_buffers_are_ignored(tmp_path, caplog):
    folder = make_model(tmp_path, "llama_tied")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(
        folder,
        {"lm_head.weight": embedding.clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)},
    )
    model = load(folder)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert not caplog.records


@pytest.mark.parametrize("compared_rows", [10, 1000])
def test_a_head_that_differs_from_the_embedding_is_used_though_config_json_ties_them(
    tmp_path, caplog, monkeypatch, compared_rows
):
    monkeypatch.setattr("engine.model.loader.COMPARED_ROWS", compared_rows)
    folder = make_model(tmp_path, "llama_tied")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    head = embedding.clone()
    head[96, 47] += 1
    rewrite(folder, {"lm_head.weight": head})
    model = load(folder)
    assert torch.equal(model.lm_head.weight, head)
    assert torch.equal(model.embed_tokens.weight, embedding)
    assert "lm_head.weight differs from model.embed_tokens.weight, so the head is not tied" in caplog.text
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(reference.lm_head.weight, head), "as transformers has it"


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "OPTForCausalLM", "Olmo2ForCausalLM"])
def test_a_head_of_its_own_is_used_whatever_the_embedding_is_called(tmp_path, architecture):
    folder = make_transformers_model(tmp_path, architecture, tie_word_embeddings=True)
    stored = load_file(folder / "model.safetensors")
    embedding = next(name for name in stored if name.endswith(("wte.weight", "embed_tokens.weight")))
    rewrite(folder, {"lm_head.weight": torch.randn_like(stored[embedding])})
    assert torch.equal(load(folder).lm_head.weight, load_file(folder / "model.safetensors")["lm_head.weight"])


def test_a_truncated_file_is_named(tmp_path):
    folder = make_model(tmp_path, "llama")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelFolderError, match=r"cannot read model\.safetensors"):
        load(folder)


def test_a_file_that_the_index_names_but_is_not_there_is_named(tmp_path):
    folder = make_model(tmp_path, "llama")
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFolderError, match=r"cannot read model-00002-of-00002\.safetensors"):
        load(folder)


def test_log_lines_say_how_far_loading_is_and_how_much_was_loaded(tmp_path, caplog, capfd, monkeypatch):
    monkeypatch.setattr(loader, "LOG_INTERVAL_S", 0.0)
    caplog.set_level(logging.INFO)
    load(make_model(tmp_path, "llama"))
    *told, last = [r.getMessage() for r in caplog.records if r.name == "engine.model.loader"]
    assert re.fullmatch(r"weights loaded folder=.* gb=0\.00 seconds=\d+\.\d", last)
    read = [float(line.rpartition("read=")[2]) for line in told]
    assert read[0] == 0.0
    assert read == sorted(read)
    assert 0.5 < read[-1] <= 1.0
    assert "loading weights" not in capfd.readouterr().err, "no progress bar without a terminal"


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_need_no_files_and_fill_every_parameter(family, tmp_path):
    cfg = ModelConfig.from_folder(make_model(tmp_path, family))
    models = [build_model(cfg, ShardPlan(), torch.float32, "cpu") for _ in range(2)]
    for model in models:
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        fill_with_noise(model)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert one.isfinite().all() and torch.equal(one, other), "the same noise for the same tensor"


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", ""])
def test_tensors_of_a_wrapped_model_or_of_its_base_load_under_their_names(tmp_path, prefix):
    folder = make_model(tmp_path, "llama")
    expected, tensors = load(folder), load_file(folder / "model.safetensors")
    names = {name: prefix + name.removeprefix("model.") for name in tensors if name.startswith("model.")}
    if prefix.startswith("language_model."):
        names["lm_head.weight"] = "language_model.lm_head.weight"
    save_file({names.get(name, name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    for ours, other in zip(load(folder).parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, other)


def test_a_tensor_under_two_of_its_names_is_refused(tmp_path):
    folder = make_model(tmp_path, "llama")
    rewrite(folder, {"norm.weight": torch.ones(48)})
    with pytest.raises(ModelFolderError, match=r"1 duplicate tensors: model\.norm\.weight"):
        load(folder)


@pytest.mark.parametrize("transposed", [False, True], ids=["as transformers saves", "as Qwen3-VL-MoE was published"])
def test_the_experts_of_a_layer_may_lie_in_one_tensor(tmp_path, transposed):
    folder = make_model(tmp_path, "qwen3_moe")
    expected, tensors = load(folder), load_file(folder / "model.safetensors")
    for layer in (0, 2):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}.{i}.{name}_proj.weight") for i in range(6)])
            for name in ("gate", "up", "down")
        )
        for name, tensor in (("gate_up_proj", torch.cat([gate, up], dim=1)), ("down_proj", down)):
            tensors[f"{prefix}.{name}"] = tensor.mT.contiguous() if transposed else tensor
    save_file(tensors, folder / "model.safetensors")
    for ours, other in zip(load(folder).parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, other)


def test_a_mismatch_names_missing_and_unexpected_tensors(tmp_path):
    folder = make_model(tmp_path, "llama")
    rewrite(folder, {"model.norm.weight": None, "transformer.ln_f.weight": torch.ones(48)})
    problem = "1 missing tensors: model.norm.weight; 1 unexpected tensors: transformer.ln_f.weight"
    with pytest.raises(ModelFolderError, match=re.escape(problem)):
        load(folder)
