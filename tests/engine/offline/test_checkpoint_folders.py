"""Model folders as they come from the Hub, from many tools and years, against transformers: the same greedy tokens from
the same text, or one line that says why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import InvalidParameter, StartupError
from engine.model.checkpoint.folder import INDEX
from engine.model.config import ModelConfig
from engine.offline.llm import LLM
from engine.wire.sampling_params import SamplingParams
from tests.engine.model.quantization.checkpoints import FORMATS, quantize_folder
from tests.models import CHAT_TEMPLATE, EOS, FAMILIES, make_model, make_tokenizer
from tests.products import each_once, few, pairwise
from tests.transformers_models import make_transformers_model

MESSAGES = [{"role": "user", "content": "What is the meaning of this word?"}]
MAX_TOKENS = 12
NATIVE, BY_TRANSFORMERS = "llama", "SmolLM3ForCausalLM"
MULTIMODAL = ["Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration", "Llama4ForConditionalGeneration"]
TOKENIZER = make_tokenizer()


def make(folder: Path, name: str, **fields: Any) -> Path:
    """Write a model with a tokenizer, as transformers 5 saves it, without generation_config.json."""
    fields = {"vocab_size": len(TOKENIZER), **fields}
    make_model(folder, name, **fields) if name == NATIVE else make_transformers_model(folder, name, **fields)
    TOKENIZER.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    return folder


def rewrite(folder: Path, file: str, change: Callable[[dict[str, Any]], None]) -> None:
    fields = json.loads((folder / file).read_text())
    change(fields)
    (folder / file).write_text(json.dumps(fields))


def set_config(folder: Path, **fields: Any) -> None:
    rewrite(folder, "config.json", lambda config: config.update(fields))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def shard(folder: Path, files: int = 3) -> None:
    """Spread the tensors over files by an index. A file that it does not name is no part of the model."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for i in range(files):
        file, part = f"model-{i + 1:05d}-of-{files:05d}.safetensors", names[i::files]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    save_file({"model.norm.weight": torch.zeros(1)}, folder / "model.fp16.safetensors")


def in_bfloat16(folder: Path, key: str) -> None:
    """key: what config.json calls the data type."""
    change_tensors(folder, lambda tensors: {name: tensor.bfloat16() for name, tensor in tensors.items()})
    rewrite(folder, "config.json", lambda config: config.pop("dtype"))
    set_config(folder, **{key: "bfloat16"})


def of_transformers_4(folder: Path) -> None:
    """Rotary parameters at the top, torch_dtype, and frequencies among the tensors."""

    def change(config: dict[str, Any]) -> None:
        config |= {"rope_theta": config.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
        config |= {"torch_dtype": config.pop("dtype"), "transformers_version": "4.40.0", "layer_types": None}

    rewrite(folder, "config.json", change)
    names = [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(3)]
    change_tensors(folder, lambda tensors: tensors | {name: torch.zeros(8) for name in names})


def template_in(folder: Path, file: str) -> None:
    (folder / "chat_template.jinja").unlink()
    if not (folder / file).exists():
        (folder / file).write_text("{}")
    rewrite(folder, file, lambda fields: fields.update(chat_template=CHAT_TEMPLATE))


def with_added_tokens(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|behind|>", "<|more|>"], special_tokens=True)
    tokenizer.save_pretrained(folder)


def with_a_copy_of_the_embedding_as_head(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})


def as_many_have_it(folder: Path) -> None:
    in_bfloat16(folder, "torch_dtype")
    shard(folder)
    template_in(folder, "tokenizer_config.json")
    with_added_tokens(folder)
    set_config(folder, eos_token_id=[EOS, 1])


TIED = {"tie_word_embeddings": True}
FOLDERS: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "as saved": (lambda folder: None, {}),
    "three files and an index": (shard, {}),
    "bfloat16 by dtype": (lambda folder: in_bfloat16(folder, "dtype"), {}),
    "bfloat16 by torch_dtype": (lambda folder: in_bfloat16(folder, "torch_dtype"), {}),
    "transformers 4": (of_transformers_4, {}),
    "template in tokenizer_config.json": (lambda folder: template_in(folder, "tokenizer_config.json"), {}),
    "template in chat_template.json": (lambda folder: template_in(folder, "chat_template.json"), {}),
    "added tokens behind the vocabulary": (with_added_tokens, {}),
    "padded vocabulary": (lambda folder: None, {"vocab_size": 448}),
    "tied head that is missing": (lambda folder: None, TIED),
    "tied head that is present": (with_a_copy_of_the_embedding_as_head, TIED),
    "most of it": (as_many_have_it, {"vocab_size": 448}),
}


def answer_of_transformers(folder: Path, auto: Any = transformers.AutoModelForCausalLM) -> tuple[list[int], list[int]]:
    """The tokens of the conversation, and of the answer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    template = folder / "chat_template.json"  # of which transformers reads a processor's only
    if template.exists():
        tokenizer.chat_template = json.loads(template.read_text())["chat_template"]
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    model, ids = auto.from_pretrained(folder, dtype=torch.float32).eval(), torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False)
    return prompt, out[0, len(prompt) :].tolist()


def answer_of_manta(folder: Path) -> tuple[list[int], list[int]]:
    sizes = {"block_size": 4, "num_gpu_blocks_override": 64, "max_num_seqs": 2, "num_threads": 1, "dtype": "float32"}
    with LLM(str(folder), **sizes) as llm:
        (output,) = llm.chat(MESSAGES, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS), use_tqdm=False)
        return output.prompt_token_ids, output.outputs[0].token_ids


@pytest.mark.parametrize(("kind", "name"), few(6, each_once(FOLDERS, [NATIVE, BY_TRANSFORMERS])))
def test_a_folder_gives_the_tokens_that_transformers_gives(tmp_path, name, kind):
    change, fields = FOLDERS[kind]
    folder = make(tmp_path, name, **{"tie_word_embeddings": False, **fields})
    change(folder)
    assert answer_of_manta(folder) == answer_of_transformers(folder)


@pytest.mark.parametrize(
    ("place", "prefix", "name"),
    few(2, pairwise(["config.json", "text_config"], ["model.language_model.", "language_model.model."], MULTIMODAL)),
)
def test_the_text_part_of_a_multimodal_folder_ends_where_transformers_ends(tmp_path, name, prefix, place):
    """prefix: of transformers 5, and of transformers 4, whose head and vision tensors are then named otherwise too."""
    auto, folder = transformers.AutoModelForImageTextToText, make(tmp_path, name)
    set_end_tokens(folder, place, None)
    _, tokens = answer_of_transformers(folder, auto)
    last = list(dict.fromkeys(tokens[:-1]))[-1]  # the one that comes first the latest, with more behind it
    assert tokens.index(last) > 0
    set_end_tokens(folder, place, [EOS, last])
    if prefix.startswith("language_model"):
        change_tensors(folder, lambda tensors: {renamed(tensor): value for tensor, value in tensors.items()})
    found = answer_of_manta(folder)
    assert found[1] == tokens[: tokens.index(last) + 1]
    assert found == answer_of_transformers(folder, auto)


def renamed(name: str) -> str:
    name = name.replace("model.language_model.", "language_model.model.")
    return f"language_model.{name}" if name.startswith("lm_head") else name.removeprefix("model.")


def set_end_tokens(folder: Path, place: str, token_ids: list[int] | None) -> None:
    def change(config: dict[str, Any]) -> None:
        for name, fields in (("config.json", config), ("text_config", config["text_config"])):
            fields.pop("eos_token_id", None)
            if name == place:
                fields["eos_token_id"] = token_ids

    rewrite(folder, "config.json", change)


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family not in ("llama_tied", "llama_rope_scaled")] + [BY_TRANSFORMERS]
)
def test_end_tokens_that_no_file_names_are_those_of_transformers_class(tmp_path, family):
    folder = make_model(tmp_path, family) if family in FAMILIES else make_transformers_model(tmp_path, family)
    (folder / "generation_config.json").unlink()
    rewrite(folder, "config.json", lambda config: config.pop("eos_token_id"))
    expected = transformers.AutoConfig.from_pretrained(folder).eos_token_id
    assert ModelConfig.from_folder(folder).eos_token_ids == ({expected} if expected is not None else set())


@pytest.mark.parametrize(("kind", "name"), each_once(["gptq", "fp8_tensor", "ct_int4"], [NATIVE, BY_TRANSFORMERS]))
def test_a_quantized_folder_gives_the_tokens_of_the_weights_that_are_meant(tmp_path, name, kind):
    source = make(tmp_path / "source", name, hidden_size=64, intermediate_size=96)
    quantize_folder(source, tmp_path / "model", tmp_path / "twin", *FORMATS[kind])
    for folder in ("model", "twin"):
        TOKENIZER.save_pretrained(tmp_path / folder)
    assert answer_of_manta(tmp_path / "model") == answer_of_transformers(tmp_path / "twin")


def add_quantization(folder: Path) -> None:
    set_config(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})


def lose_a_file(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "unknown quantization": (add_quantization, "quantization_config.quant_method = 'bitsandbytes' is not supported"),
    "a file is missing": (lose_a_file, "cannot read model-00002-of-00003.safetensors"),
    "only pickled weights": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "has no *.safetensors, only pytorch_model.bin; convert them first",
    ),
    "another vocabulary": (lambda folder: set_config(folder, vocab_size=len(TOKENIZER) - 1), "config.json asks for ["),
    "a dtype of its own": (lambda folder: set_config(folder, dtype="float8_e4m3fn"), "dtype = 'float8_e4m3fn'"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("name", [NATIVE, BY_TRANSFORMERS])
def test_a_folder_that_cannot_be_served_is_refused_in_one_line(tmp_path, name, kind):
    folder, (change, reason) = make(tmp_path, name), REFUSED[kind]
    change(folder)
    with pytest.raises(StartupError) as error:
        answer_of_manta(folder)
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_a_token_behind_the_vocabulary_is_refused_where_it_is_used(tmp_path):
    folder = make(tmp_path, NATIVE)
    with_added_tokens(folder)
    with LLM(str(folder), dtype="float32", num_gpu_blocks_override=16, num_threads=1) as llm:
        with pytest.raises(InvalidParameter, match=f"prompt must be token ids from 0 to {len(TOKENIZER) - 1}, got"):
            llm.generate("one <|behind|> two", use_tqdm=False)
        assert llm.generate("one", SamplingParams(max_tokens=1), use_tqdm=False)[0].outputs[0].token_ids
