"""The checks of `manta doctor`, each on machines that it is told of."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from typer.testing import CliRunner

from cluster.cli.check import model_fit
from cluster.cli.check.doctor import check_extra, check_needed, gpus_without_torch
from cluster.cli.check.finding import Finding
from cluster.cli.check.model_fit import check_models, weight_bytes
from cluster.cli.check.ports import check_port
from cluster.cli.main import app
from cluster.config.app_config import AppConfig
from engine.devices.free_memory import FreeMemory
from engine.errors import StartupError
from engine.model.config import ModelConfig
from engine.model.stage import nth_stage
from engine.runner.kv_cache import GIB
from placement.capacity import Node
from tests.adapter_folders import write_adapter
from tests.engine.lora.peft_adapters import make_adapter
from tests.engine.model.quantization.checkpoints import FORMATS, quantize_folder
from tests.models import make_model
from tests.vision_models import make_vision_chat_model


def levels(findings: list[Finding]) -> dict[str, str]:
    """The worst of each topic."""
    found: dict[str, str] = {}
    for finding in findings:
        found[finding.topic] = max(
            found.get(finding.topic, "ok"), finding.level, key=("ok", "warning", "problem").index
        )
    return found


def test_packages_that_are_missing_or_wrong_are_problems():
    assert check_needed([Requirement("torch>=1"), Requirement("ray")]).level == "ok"
    wrong = check_needed([Requirement("torch<1"), Requirement("no-such-package-at-all")])
    assert wrong.level == "problem"
    assert "torch is 2" in wrong.message and "no-such-package-at-all is not installed" in wrong.message


def test_extra_that_is_not_installed_is_no_warning_but_says_what_it_is_for():
    finding = check_extra("otel", "traces", [Requirement("no-such-package-at-all")])
    assert finding.level == "ok"
    assert finding.advice == "Needed only for traces: pip install 'manta-serve[otel]'"


def test_port_that_somebody_listens_on_is_a_problem():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert check_port("127.0.0.1", port, "the API", "Stop it").level == "problem"
    assert check_port("127.0.0.1", port, "the API", "Stop it").level == "ok"


def test_gpu_that_torch_cannot_use_is_a_problem():
    assert gpus_without_torch([]).level == "ok"
    finding = gpus_without_torch(["NVIDIA L4, 550.54.15, 23034 MiB"])
    assert finding.level == "problem"
    assert "NVIDIA L4" in finding.message


# -- models --------------------------------------------------------------------------------------------------


def config(folder: Path, **section: Any) -> AppConfig:
    return AppConfig.parse({"models": [{"name": "tiny", "model": str(folder), **section}]})


def test_weights_are_counted_in_the_dtype_that_they_are_loaded_in(folder: Path):
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    float32 = weight_bytes(folder, torch.float32)
    assert float32 == 2 * weight_bytes(folder, torch.bfloat16)
    assert stored / 2 < float32 <= 2 * stored


@pytest.mark.parametrize("name", ["awq", "gptq", "ct_int4", "ct_packed_int8"])
def test_weights_of_four_bits_take_on_a_gpu_what_they_are_dequantized_to(name, tmp_path: Path):
    source = make_model(tmp_path / "source", "llama", hidden_size=64, intermediate_size=96)
    quantize_folder(source, tmp_path / "model", tmp_path / "twin", *FORMATS[name])
    packed = model_fit.packed_numbers(ModelConfig.from_folder(tmp_path / "model"))
    expected = weight_bytes(tmp_path / "twin", torch.bfloat16)
    on_gpu, on_cpu = (weight_bytes(tmp_path / "model", torch.bfloat16, packed=count) for count in (packed, 0))
    assert expected <= on_gpu < 1.2 * expected, "the weights, and their scales"
    assert on_cpu < 0.9 * on_gpu
    assert model_fit.packed_numbers(ModelConfig.from_folder(source)) == 0


def test_replica_that_fits_no_node_is_a_problem_and_one_that_fits_is_not(folder: Path):
    node = Node({"CPU": 2.0}, {})
    fits = list(check_models(config(folder), [node], here=False))
    assert set(levels(fits).values()) == {"ok"}
    large = list(check_models(config(folder, decode={"num_gpus": 1}), [node], here=False))
    assert levels(large)["decode of tiny"] == "problem"
    assert any("no node has 1 GPU" in finding.message for finding in large)


def test_replicas_that_fit_one_by_one_may_not_fit_together(folder: Path):
    node = Node({"CPU": 2.0}, {})
    found = levels(list(check_models(config(folder, decode={"num_replicas": 3}), [node], here=False)))
    assert found == {"decode of tiny": "ok", "all replicas": "problem"}
    growing = Node({"CPU": 2.0}, {"ray.io/node-group": "workers"})
    found = levels(list(check_models(config(folder, decode={"num_replicas": 3}), [growing], here=False)))
    assert found == {"decode of tiny": "ok", "all replicas": "warning"}


def told(config: AppConfig) -> list[str]:
    return [finding.message for finding in check_models(config, [Node({"CPU": 2.0}, {})], here=True)]


def test_the_kv_cache_of_the_stage_with_most_layers_sets_its_size(folder: Path):
    sizes = {"kv_cache_memory_bytes": 2**20, "max_model_len": 100, "max_num_seqs": 256}
    whole, staged = (told(config(folder, engine={**sizes, "pipeline_parallel_size": n})) for n in (1, 3))
    (stages,) = (line for line in staged if "pipeline stages" in line)
    assert re.fullmatch(r"3 pipeline stages, of which a rank has (1 layers with 0\.00 GiB(, )?){3} of weights", stages)
    tokens = [
        int(re.search(r"KV cache for ([\d,]+) tokens", " ".join(lines))[1].replace(",", ""))
        for lines in (whole, staged)
    ]
    assert tokens[1] >= 3 * tokens[0] > 0


def test_stages_have_the_weights_of_the_model_and_a_tied_embedding_twice(tmp_path: Path):
    folder = make_model(tmp_path, "llama", tie_word_embeddings=True)
    shape, dtype = ModelConfig.from_folder(folder), torch.float32
    stages = [nth_stage(stage, [1, 1, 1], shape) for stage in range(3)]
    sizes = [weight_bytes(folder, dtype, stage=stage) for stage in stages]
    embedding = shape.vocab_size * shape.hidden_size * 4
    assert sum(sizes) == weight_bytes(folder, dtype) + embedding
    assert sizes[0] - sizes[1] == embedding == sizes[2] - sizes[1] - 4 * shape.hidden_size


def test_kv_cache_is_what_a_rank_would_choose_at_its_start(folder: Path):
    found = told(config(folder, engine={"num_gpu_blocks_override": 50, "max_model_len": 100}))
    assert "KV cache for 800 tokens: 8.0 requests of max_model_len 100" in found


def test_memory_is_told_of_each_kv_cache_group_and_of_states(tmp_path_factory):
    engine = {"num_gpu_blocks_override": 50, "max_model_len": 100, "max_num_seqs": 8}
    windowed, hybrid = (make_model(tmp_path_factory.mktemp(name), name, tokenizer=True) for name in ("gemma3", "lfm2"))
    (windows,) = (line for line in told(config(windowed, engine=engine)) if "KV cache" in line)
    assert "8.0 requests of max_model_len 100; 1 layers that keep all tokens: 50 blocks" in windows
    assert "2 layers that keep the newest 8 tokens: 50 blocks" in windows
    (states,) = (line for line in told(config(hybrid, engine=engine)) if "KV cache" in line)
    assert "8.0 requests of max_model_len 100; states of 8 running sequences: 0.00 GiB, and " in states


def test_model_or_cache_that_does_not_fit_into_memory_is_a_problem(folder: Path, monkeypatch):
    monkeypatch.setattr(model_fit, "free_host_memory", lambda: FreeMemory(10 * GIB, "the box"))
    assert any(
        "kv_cache_memory_bytes=11811160064 does not fit: only 10.00 GiB are free (the box)" in line
        for line in told(config(folder, engine={"kv_cache_memory_bytes": 11 * 2**30}))
    )
    monkeypatch.setattr(model_fit, "free_host_memory", lambda: FreeMemory(0, "the box"))
    assert any("do not fit into memory" in line for line in told(config(folder)))


def test_the_rank_with_most_experts_needs_most_memory(tmp_path, monkeypatch):
    folder = make_model(tmp_path, "mixtral", tokenizer=True)  # 5 experts
    weights = []
    monkeypatch.setattr(model_fit, "check_kv_cache", lambda topic, engine, shape, dtype, bytes, on_gpu: (
        weights.append(bytes), Finding("ok", topic, ""))[1])  # fmt: skip
    for layout in ({"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "enable_expert_parallel": True},
                   {"data_parallel_size": 2, "enable_expert_parallel": True}):  # fmt: skip
        messages = told(config(folder, engine=layout))
        known = any("5 experts over 2 ranks: at most 3 of each layer per rank" in text for text in messages)
        assert known == ("enable_expert_parallel" in layout)
    of_experts, whole = (weight_bytes(folder, torch.float32, part=part) for part in (".experts.", ""))
    assert weights[1] - weights[0] == of_experts * 3 // 5 - of_experts // 2 > 0
    assert weights[2] == whole - of_experts + of_experts * 3 // 5, "all other weights are whole in each engine"


def test_an_encode_engine_loads_what_encodes_images_and_keeps_embeddings(tmp_path):
    folder = make_vision_chat_model(tmp_path)
    engine = {"block_size": 16, "dtype": "float32", "max_model_len": 256}
    found = list(check_models(config(folder, encode={}, engine=engine), [Node({"CPU": 4.0}, {})], here=True))
    assert levels(found) == {"decode of tiny": "ok", "encode of tiny": "ok", "all replicas": "ok"}
    whole, encoder = (weight_bytes(folder, torch.float32, with_text=flag) for flag in (True, False))
    assert 0 < encoder < whole


def test_adapters_that_are_listed_are_compared_with_the_model_and_slots_with_memory(tmp_path, monkeypatch):
    folder = make_model(tmp_path / "tiny", "llama", tokenizer=True)
    good = {"target_modules": "all-linear"}
    for name, base in (("mine", "acme/Tiny-8bit"), ("theirs", "acme/llama")):
        make_adapter(tmp_path / name, folder, 1, **good)
        file = tmp_path / name / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base}))
    write_adapter(tmp_path / "wrong")
    names = ("mine", "theirs", "wrong")
    configured = config(folder, lora_modules={name: str(tmp_path / name) for name in names}, engine={"max_loras": 4})
    found = {f.topic: f for f in check_models(configured, [Node({"CPU": 4.0}, {})], here=True)}
    assert [found[f"adapter {name} of tiny"].level for name in names] == ["ok", "warning", "problem"]
    assert "was trained on acme/llama" in found["adapter theirs of tiny"].message
    assert "of a layer with 48 inputs and 64 outputs, got 16 and 32" in found["adapter wrong of tiny"].message
    assert any("4 slots for adapters of rank 16: 0.00 GiB per rank" in line for line in told(configured))
    monkeypatch.setattr("cluster.cli.check.parts.lora.layers.ModelAdapters.slot_bytes", 20 * GIB)
    monkeypatch.setattr(model_fit, "free_host_memory", lambda: FreeMemory(10 * GIB, "the box"))
    assert any("do not fit into memory" in line for line in told(configured))


@pytest.mark.parametrize(
    ("family", "target"),
    [("qwen3_moe", {"target_modules": [], "target_parameters": ["experts.down_proj"]}), ("deepseek_v3", {})],
)
def test_adapters_of_experts_and_of_latent_attention_are_refused_for_gpus_with_the_reason(family, target, tmp_path):
    folder = make_model(tmp_path / "tiny", family, tokenizer=True)
    make_adapter(tmp_path / "mine", folder, 1, **target)
    for num_gpus, level in ((0, "ok"), (1, "problem")):
        configured = config(folder, lora_modules={"mine": str(tmp_path / "mine")}, decode={"num_gpus": num_gpus})
        nodes = [Node({"CPU": 4.0, "GPU": 1.0}, {})]
        (found,) = (f for f in check_models(configured, nodes, here=False) if f.topic == "adapter mine of tiny")
        assert found.level == level, found
    part = "experts" if target else "kv_b_proj"
    assert re.search(
        rf"on a GPU they have no kernel yet.*\d of \d+ without a matching layer: [\w.]*{part}", found.message
    )


def test_kernels_that_no_gpu_has_run_are_a_problem_until_they_are_allowed(folder: Path):
    nodes, decode = [Node({"CPU": 4.0, "GPU": 1.0}, {})], {"num_gpus": 1}
    for options, level in (({"enable_lora": True}, "problem"), ({}, "ok")):
        found = check_models(config(folder, engine=options, decode=decode), nodes, here=False)
        assert levels(list(found))["decode of tiny"] == level
    options = {"enable_lora": True, "allow_untested_kernels": True}
    found = list(check_models(config(folder, engine=options, decode=decode), nodes, here=False))
    assert levels(found)["decode of tiny"] == "ok"


def test_a_check_of_a_file_names_an_adapter_that_does_not_fit(tmp_path):
    write_adapter(tmp_path / "wrong")
    file = tmp_path / "serve_config.yaml"
    models = [{"name": "pocket", "model": "pocket", "lora_modules": {"pirate": "pocket-pirate"}}]
    file.write_text(json.dumps({"applications": [{"import_path": "manta:build", "args": {"models": models}}]}))
    assert CliRunner().invoke(app, ["check", str(file)]).exit_code == 0
    models[0]["lora_modules"] = {"wrong": str(tmp_path / "wrong")}
    file.write_text(json.dumps({"applications": [{"import_path": "manta:build", "args": {"models": models}}]}))
    with pytest.raises(StartupError, match="lora_modules of model 'pocket': adapter 'wrong'"):
        CliRunner().invoke(app, ["check", str(file)], catch_exceptions=False)
