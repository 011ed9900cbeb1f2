"""What `manta doctor` says about the layout of models on a cluster's GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.cli.check.layout_fit import check_layouts, gpus_of
from cluster.config.app_config import AppConfig
from cluster.lab.planning.known_models import sizes_of
from cluster.lab.simulator.cost_model import CARDS, MODELS, ModelShape
from placement.capacity import Node
from tests.models import make_model

H100 = Node({"CPU": 64.0, "GPU": 8.0, "accelerator_type:H100": 1.0}, {})
LARGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256, "max_position_embeddings": 8192,
         "dtype": "bfloat16"}  # fmt: skip


@pytest.fixture
def large(tmp_path) -> Path:
    """A folder whose config.json describes a model of 70 billion parameters. It has no such weights."""
    folder = make_model(tmp_path, "llama", tokenizer=True)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | LARGE))
    return folder


def config(folder: Path, num_gpus: int = 1, **engine: object) -> AppConfig:
    return AppConfig.of(
        {"args": {"models": [{"name": "m", "model": str(folder), "engine": engine, "decode": {"num_gpus": num_gpus}}]}}
    )


def test_the_best_layout_is_named_with_its_reason_and_beside_it_the_configured_one(large):
    (finding,) = check_layouts(config(large, tensor_parallel_size=4), [H100, H100])
    assert finding.level == "ok" and finding.topic == "layout of m"
    assert finding.message.startswith("best: tensor_parallel_size 8: 16.2 GiB of weights per rank, ")
    assert "because on 2 ranks weights and KV do not fit" in finding.message
    assert finding.advice.startswith("Configured: tensor_parallel_size 4: ")
    (finding,) = check_layouts(config(large, tensor_parallel_size=8), [H100, H100])
    assert not finding.advice


def test_nodes_with_few_gpus_and_an_ordinary_network_get_stages(large):
    node = Node({"GPU": 4.0, "accelerator_type:A100-40G": 1.0}, {})
    small = [Node({"GPU": 2.0, "accelerator_type:H100": 1.0}, {})] * 2
    (finding,) = check_layouts(config(large), small, network_gbit=1.0)
    assert finding.message.startswith("best: tensor_parallel_size 2, pipeline_parallel_size 2: ")
    assert gpus_of([node]) == (CARDS["a100"], 1, 4)


def test_clusters_and_models_without_known_gpus_get_no_layout(large):
    assert not list(check_layouts(config(large), [Node({"CPU": 8.0}, {})]))
    assert not list(check_layouts(config(large), [Node({"GPU": 8.0, "accelerator_type:TPU": 1.0}, {})]))
    assert not list(check_layouts(config(large, num_gpus=0), [H100]))


def test_the_most_common_kind_of_node_counts():
    others = Node({"GPU": 1.0, "accelerator_type:L4": 1.0}, {})
    assert gpus_of([others, H100, H100]) == (CARDS["h100"], 2, 8)


def test_sizes_are_those_of_the_model(tmp_path):
    shape = ModelShape.from_folder(make_model(tmp_path / "moe", "qwen3_moe"))
    sizes, cfg = sizes_of(shape), shape.config
    assert sizes.dense_bytes + sizes.expert_bytes == shape.weight_bytes
    assert (sizes.num_experts, sizes.experts_per_token) == (cfg.moe.num_experts, cfg.moe.experts_per_token)
    one = 3 * 4 * cfg.hidden_size * cfg.moe.intermediate_size
    assert sizes.expert_bytes == len(cfg.moe.layers) * cfg.moe.num_experts * one
    assert sizes_of(ModelShape.from_folder(make_model(tmp_path / "mla", "deepseek_v3"))).kv_heads == 1
    llama = sizes_of(MODELS["llama-3.1-8b"])
    assert (llama.layers, llama.hidden, llama.num_experts) == (32, 4096, 0)
