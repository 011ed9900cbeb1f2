"""Folders as PEFT and others write them, and those that are refused."""

from __future__ import annotations

import json
import pickle
import struct
import subprocess
import sys
import tracemalloc
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from peft import LoraConfig
from safetensors.torch import save_file

from engine.lora.adapter_config import HARMLESS, READ, UNSUPPORTED
from engine.lora.adapter_files import open_adapter
from engine.lora.errors import AdapterError, AdapterNotFound

Q = "model.layers.0.self_attn.q_proj"
NAME = "base_model.model.{}.lora_{}.weight"


WRONG_NUMBERS = ("8", None, True, [], 10**400, -(10**400), float("inf"), float("nan"), 1e7)
CHANGED_BASES = ("pissa", "pissa_niter_16", "PiSSA", "olora", "corda", "loftq", "lora_ga", "something_new", 1, ["eva"])


def pair(module: str = Q, rank: int = 4, name: str = NAME) -> dict[str, torch.Tensor]:
    return {name.format(module, "A"): torch.rand(rank, 16), name.format(module, "B"): torch.rand(32, rank)}


def write(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **config: object) -> Path:
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    save_file(pair() if tensors is None else tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"} | config
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "name", [NAME, "base_model.model.{}.lora_{}.default.weight", "{}.lora_{}.weight"], ids=["peft", "named", "bare"]
)
def test_both_styles_of_names_are_read(tmp_path, name):
    adapter = open_adapter(write(tmp_path, pair(name=name)))
    assert list(adapter.modules) == [Q] and adapter.rank == 4
    assert adapter.modules[Q].a.shape == (4, 16) and adapter.modules[Q].b.shape == (32, 4)


def test_the_scale_follows_alpha_its_patterns_and_rslora(tmp_path):
    config = open_adapter(write(tmp_path, alpha_pattern={r"layers\.1\..*": 32, "k_proj": 2})).config
    assert config.scale(Q, 4) == 8 / 4
    config.check_rank(Q, 4)
    assert config.scale("model.layers.1.self_attn.k_proj", 8) == 32 / 8  # the first that matches
    assert config.scale("model.layers.0.self_attn.k_proj", 2) == 1
    assert config.scale("model.layers.0.self_attn.my_k_proj", 2) == 4  # a suffix begins after a dot
    assert open_adapter(write(tmp_path, use_rslora=True)).config.scale(Q, 4) == 8 / 2


@pytest.mark.parametrize(
    ("version", "may_be"), [(None, True), ("0.18.2.dev0@UNKNOWN", True), ("x", True), ("0.19.0", False), ("1.0", False)]
)
def test_inputs_and_outputs_of_experts_may_be_exchanged_unless_a_newer_peft_names_itself(tmp_path, version, may_be):
    assert open_adapter(write(tmp_path, peft_version=version)).config.may_be_swapped == may_be


def test_a_digest_tells_the_arithmetic_and_nothing_else(tmp_path):
    first = open_adapter(write(tmp_path / "a")).digest
    assert open_adapter(write(tmp_path / "b", base_model_name_or_path="elsewhere", lora_dropout=0.1)).digest == first
    others = [{"lora_alpha": 9}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 1}}]
    digests = {open_adapter(write(tmp_path / "c", **other)).digest for other in others}
    changed = {name: tensor + 1 for name, tensor in pair().items()}
    assert len({first, *digests, open_adapter(write(tmp_path / "d", changed)).digest}) == 5


@pytest.mark.parametrize("nothing", [None, False, [], {}, ""])
def test_keys_that_ask_for_nothing_are_no_obstacle(tmp_path, nothing):
    keys = ("use_dora", "modules_to_save", "layer_replication", "use_something_new", "kasa_config", "unheard_of")
    open_adapter(write(tmp_path, **dict.fromkeys(keys, nothing)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type must be LORA"),
        ({"use_dora": True}, "use_dora must be left out: DoRA"),
        ({"bias": "all"}, "bias must be none"),
        ({"lora_bias": True}, "lora_bias must be left out"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save must be left out"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices must be left out"),
        ({"layer_replication": [[0, 2]]}, "layer_replication must be left out"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens must be left out"),
        ({"use_quantum": True}, "use_quantum must be left out: Manta does not know this variant"),
        ({"some_new_config": {"a": 1}}, "some_new_config must be left out: Manta does not know this variant"),
        *(({"lora_alpha": wrong}, "lora_alpha must be a number of at most") for wrong in WRONG_NUMBERS),
        *(({"alpha_pattern": {"q": wrong}}, "alpha_pattern['q'] must be a number") for wrong in WRONG_NUMBERS),
        *(({"r": wrong}, "r must be a whole number from 1") for wrong in (*WRONG_NUMBERS, 0, -4, 4.0)),
        *(
            ({"rank_pattern": {"q": wrong}}, "rank_pattern['q'] must be a whole number")
            for wrong in (*WRONG_NUMBERS, 0)
        ),
        ({"alpha_pattern": [1]}, "alpha_pattern must be a JSON object"),
        ({"r": 8}, f"r must be 4, the rank of the tensors of {Q}, got 8"),
        ({"rank_pattern": {"q_proj": 16}}, f"rank_pattern must be 4, the rank of the tensors of {Q}, got 16"),
        ({"r": 16, "rank_pattern": {"k_proj": 4}}, "r must be 4"),
        *(({"init_lora_weights": init}, "init_lora_weights must be true, false, gaussian") for init in CHANGED_BASES),
    ],
)
def test_what_would_compute_something_else_is_refused_by_name(tmp_path, config, message):
    with pytest.raises(AdapterError) as caught:
        open_adapter(write(tmp_path, **config), "sql")
    assert str(caught.value).startswith(f"adapter 'sql': {message}")
    assert str(pickle.loads(pickle.dumps(caught.value))).startswith(f"adapter 'sql': {message}")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 2)}, "adapters of embeddings"),
        ({f"base_model.model.{Q}.lora_magnitude_vector": torch.ones(2)} | pair(), "lora_magnitude_vector"),
        ({f"base_model.model.{Q}.lora_B.bias": torch.ones(2)} | pair(), "lora_B.bias"),
        ({"base_model.model.model.embed_tokens.base_layer.weight": torch.ones(2, 2)}, "adapters of embeddings"),
        (
            {"base_model.model.lm_head.base_layer.weight": torch.ones(2, 2)} | pair(),
            "adapters of the output head are not supported; merge the adapter into the model instead, got "
            "'base_model.model.lm_head.base_layer.weight'",
        ),
        ({NAME.format(Q, "A"): torch.ones(4, 2)}, "q_proj.lora_B must be in adapter_model.safetensors"),
        (pair() | {NAME.format(Q, "A"): torch.ones(2, 2)}, "of the same rank"),
        (pair() | pair(name="base_model.model.{}.lora_{}.other.weight"), "of the same adapter"),
        ({NAME.format(Q, "A"): torch.ones(4, 2, dtype=torch.int8)}, "of dtype"),
        ({}, "a file with tensors"),
    ],
)
def test_tensors_that_are_no_pairs_of_factors_are_refused(tmp_path, tensors, message):
    with pytest.raises(AdapterError, match=message.replace(".", r"\.")):
        open_adapter(write(tmp_path, tensors))


def test_files_that_are_missing_or_cut_short_are_refused(tmp_path):
    with pytest.raises(AdapterNotFound, match="must be a folder"):
        open_adapter(tmp_path / "none")
    with pytest.raises(AdapterNotFound, match=r"adapter_config\.json must be in the folder"):
        open_adapter(tmp_path)
    file = write(tmp_path) / "adapter_model.safetensors"
    content = file.read_bytes()
    for length in (0, 4, 100, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(AdapterError, match=r"adapter_model\.safetensors must be .*whole"):
            open_adapter(tmp_path)
    file.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterNotFound, match=r"adapter_model\.bin") as caught:
        open_adapter(tmp_path)
    assert caught.value.status == 404


@pytest.mark.parametrize(
    "content",
    ["[" * 100_000, '{"a":' * 100_000, '{"r": 1' + "0" * 5000 + "}", '"' + "a" * (16 << 20) + '"'],
    ids=["nested", "nested objects", "digits", "large"],
)
def test_configurations_of_hostile_sizes_are_refused(tmp_path, content):
    (write(tmp_path) / "adapter_config.json").write_text(content)
    with pytest.raises(AdapterError, match=r"adapter_config\.json must be"):
        open_adapter(tmp_path)


def header(**tensors: object) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 90 << 20) + b"{}",
        header(a={"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 4 * 10**18]}),
        header(a={"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 0]}),
        header(a={"dtype": "F32", "shape": [10**30], "data_offsets": [0, 0]}),
        struct.pack("<Q", 100_000) + b'{"a":' * 20_000,
    ],
)
def test_weights_of_hostile_sizes_are_refused_before_memory_is_taken(tmp_path, content):
    (write(tmp_path) / "adapter_model.safetensors").write_bytes(content)
    tracemalloc.start()
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors must be"):
        open_adapter(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_a_file_that_memory_does_not_hold_is_refused_before_it_is_read(tmp_path):
    with (write(tmp_path) / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(2**42)  # takes no place on the disk
    with pytest.raises(AdapterError, match=r"at most a 3rd of the free memory: .* GiB are free .*got 4096\.00 GiB"):
        open_adapter(tmp_path)


def test_names_of_tensors_are_short(tmp_path):
    with pytest.raises(AdapterError, match="of names with at most 500 characters"):
        open_adapter(write(tmp_path, pair("a" * 600)))


def test_every_key_that_peft_writes_is_read_harmless_or_refused():
    """So a key that a new version of PEFT adds is looked at by a person before it is ignored."""
    keys = {field.name for field in fields(LoraConfig)}
    assert keys <= READ | HARMLESS | UNSUPPORTED.keys(), "new in PEFT"
    assert not READ & HARMLESS and not (READ | HARMLESS) & UNSUPPORTED.keys()


def test_what_peft_writes_by_default_is_read(tmp_path):
    folder = write(tmp_path)
    LoraConfig(r=4, target_modules=["q_proj"]).save_pretrained(str(folder))
    assert open_adapter(folder).config.r == 4


def test_a_hub_id_is_found_in_the_hubs_cache(tmp_path, monkeypatch):
    """In which the Hub's own client looks when it must not ask the Hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached, commit = tmp_path / "models--acme--sql", "0" * 40
    (cached / "snapshots").mkdir(parents=True)
    write(cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    assert open_adapter("acme/sql").digest == open_adapter(cached / "snapshots" / commit).digest
    with pytest.raises(AdapterNotFound, match=r"a repository that the Hugging Face Hub can deliver"):
        open_adapter("acme/other")


def test_an_ingress_reads_adapters_without_torch():
    program = "import engine.lora.adapter_files, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
