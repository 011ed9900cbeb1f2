"""Files of a model that anybody has written: whatever stands in a field, it is refused by name or read, and quickly."""

from __future__ import annotations

import json
import random
import shutil
from types import SimpleNamespace

import pytest

from engine import pocket
from engine.errors import ModelFolderError, ServingError
from engine.model.checkpoint.folder import eos_token_ids
from engine.model.checkpoint.sampling_defaults import default_sampling
from engine.model.config import ModelConfig
from engine.spec_decode.eagle3 import Eagle3Config
from engine.text.chat_tokenizer import ChatTokenizer
from tests.examples import examples

CONFIG = json.loads((pocket.PATH / "config.json").read_text())
SIZE, LAYERS = CONFIG["hidden_size"], CONFIG["num_hidden_layers"]
BAD = [None, -1, 0, 1e30, 10**40, "x", "a" * 100_000, "../../etc/passwd", "\ud800", float("nan"), True, [], {}]
BAD += [[[1]], [None], [1e9] * 3, {"a": 1}]  # fmt: skip

GENERATION = {"eos_token_id": [1, 2], "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "do_sample": True}
TOKENIZER = {
    "added_tokens_decoder": {"0": {"content": "<s>", "special": True, "normalized": False}},
    "bos_token": "<s>",
    "eos_token": {"content": "</s>"},
    "chat_template": [{"name": "default", "template": "x"}],
    "tokenizer_class": "X",
}
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
]
EMBEDDING = {
    "modules.json": MODULES,
    "1_Pooling/config.json": {"word_embedding_dimension": SIZE, "pooling_mode_mean_tokens": True},
    "2_Dense/config.json": {"in_features": SIZE, "out_features": 32, "bias": True, "activation_function": "a.Tanh"},
    "sentence_bert_config.json": {"max_seq_length": 128, "do_lower_case": False},
    "config_sentence_transformers.json": {"prompts": {"q": "q: "}, "default_prompt_name": "q", "activation_fn": None},
}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False}
QUANTIZATIONS = [
    {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "ignored_layers": ["b"]},
    {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 128, "zero_point": True},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "checkpoint_format": "gptq"},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["a.*.b"]},
    {"quant_method": "gguf", "types": {"model.layers.0.mlp.down_proj": "Q4_K"}},
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*x"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
        "sparsity_config": {},
    },
]
EAGLE = {
    **CONFIG,
    "draft_vocab_size": 100,
    "target_hidden_size": SIZE,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0], "use_aux_hidden_state": True},
    "transformer_layer_config": {"hidden_size": SIZE},
}


class ReadError(ServingError):
    """A drafter's configuration was read; its weights would be next."""


class ReadingTarget(SimpleNamespace):
    config, block_size, dummy = ModelConfig.from_folder(pocket.PATH), 16, True

    @property
    def dtype(self):
        raise ReadError


def read_model(folder):
    config = ModelConfig.from_folder(folder)
    assert config.supported_tasks.names
    assert config.weight_format("layers.0.self_attn", "q_proj") is not config


def read_texts(folder):
    ChatTokenizer.from_folder(folder)
    default_sampling(folder)
    eos_token_ids(folder)


FILES = {
    "generation_config.json": (GENERATION, {}, read_texts),
    "tokenizer_config.json": (TOKENIZER, {}, read_texts),
    "special_tokens_map.json": ({"bos_token": "a", "additional_special_tokens": ["x"]}, {}, read_texts),
    "added_tokens.json": ({"x": 5000}, {"tokenizer_config.json": {}}, read_texts),
    **{name: (sample, EMBEDDING, read_model) for name, sample in EMBEDDING.items()},
    **{
        f"config.json ({sample['quant_method']})": ({**CONFIG, "quantization_config": sample}, {}, read_model)
        for sample in QUANTIZATIONS
    },
    "config.json (eagle3)": (EAGLE, {}, lambda folder: Eagle3Config.from_folder(folder, ReadingTarget())),
}


def paths(value, before=()):
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*before, key)
        yield from paths(inner, (*before, key))


def changed(value, path, bad):
    if not path:
        return bad
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], bad)
    return copy


@pytest.mark.parametrize("name", FILES)
def test_any_value_in_any_field_is_read_or_refused_in_one_line(tmp_path, name):
    sample, others, read = FILES[name]
    folder, file = tmp_path / "model", name.partition(" ")[0]
    shutil.copytree(pocket.PATH, folder)
    for other, content in others.items():
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_text(json.dumps(content))
    cases = [(path, bad) for path in [(), *paths(sample)] for bad in BAD]
    for path, bad in random.Random(name).sample(cases, min(len(cases), examples(400))):
        (folder / file).write_text(json.dumps(changed(sample, path, bad)))
        refusal = ""
        try:
            read(folder)
        except ServingError as error:
            refusal = str(error)
        assert "\n" not in refusal and len(refusal) < 3000, path


@pytest.mark.parametrize("path", ["..", "../other", "/etc", "1_Pooling/../..", "a" * 300])
def test_modules_of_a_model_are_in_its_own_folder(tmp_path, path):
    folder = tmp_path / "model"
    shutil.copytree(pocket.PATH, folder)
    module = {"idx": 0, "path": path, "type": "sentence_transformers.models.Dense"}
    (folder / "modules.json").write_text(json.dumps([module]))
    with pytest.raises(ModelFolderError, match=r"modules\.json: path = .* must be the name of a folder"):
        ModelConfig.from_folder(folder)
