"""Compiled models against their plain twins.

Most are traced as for Inductor, but run by torch's own operations, which takes no C++ compiler and little time. Some
go through Inductor with `make test-all`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._inductor import config as inductor_config
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.errors import StartupError
from engine.model.config import ModelConfig
from engine.model.loader import load_weights, pack_weights
from engine.model.models.registry import build_model
from engine.model.ops import dispatch
from engine.model.ops.cpu.quantized_linear import Integers
from engine.model.shard import ShardPlan
from engine.runner.graphs.torch_compile import compile_layers
from tests.batches import ByHand
from tests.engine.model.quantization.checkpoints import W8A8, quantize_folder
from tests.gpu.engines import check_same, generate, make_core, requests, run
from tests.late_device import LateDevice
from tests.models import FAMILIES, make_model
from tests.ranks import make_plans, on_all

ONE = ShardPlan()
# chunks and single tokens, and every number of tokens only once; 48 and 64 are widths of the models
STEPS = [{0: list(range(20)), 1: [5, 6, 7]}, {0: [9], 1: [8, 11]}, {2: [3]}, {3: list(range(48))}, {4: list(range(64))}]

# those with latent attention and of Gemma 3n's layers are refused (rank_setup.check_layers)
COMPILED = [
    name
    for name, (kind, fields) in FAMILIES.items()
    if not kind.startswith(("Gemma3n", "Gemma4")) and "kv_lora_rank" not in fields
]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What one test has compiled is of no use to the next."""
    yield
    torch._dynamo.reset()


@pytest.fixture
def inductor() -> None:
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        pytest.skip(f"needs a C++ compiler: {error}")


@pytest.fixture
def traced(monkeypatch) -> None:
    monkeypatch.setattr("engine.runner.graphs.torch_compile.torch.compile", partial(torch.compile, backend="aot_eager"))


def load(folder: Path, tp: ShardPlan = ONE) -> ByHand:
    cfg = ModelConfig.from_folder(folder)
    model = build_model(cfg, tp, torch.float32, "cpu")
    load_weights(model, folder, tp.ranks)
    pack_weights(model)
    return ByHand(model, cfg, tp=tp)


def load_compiled(folder: Path, tp: ShardPlan = ONE) -> ByHand:
    by_hand = load(folder, tp)
    cfg = ModelConfig.from_folder(folder)
    compile_layers(by_hand.model, cfg, tp.ranks, lambda tokens: by_hand.step({-tokens: list(range(tokens))}))
    return by_hand


def logits(model: ByHand) -> list[Tensor]:
    """Compute the logits of STEPS. Raises if anything is compiled now."""
    with dynamo_config.patch(error_on_recompile=True):
        return [model.step(tokens) for tokens in STEPS]


def check_same_logits(folder: Path) -> None:
    torch.testing.assert_close(logits(load_compiled(folder)), logits(load(folder)), atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", COMPILED)
@pytest.mark.usefixtures("traced")
def test_a_traced_model_has_the_logits_of_the_plain_one_for_any_number_of_tokens(family, folder_of):
    check_same_logits(folder_of(family))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "gpt_oss"])
@pytest.mark.usefixtures("inductor")
def test_a_compiled_model_has_the_logits_of_the_plain_one_for_any_number_of_tokens(family, folder_of):
    check_same_logits(folder_of(family))


@pytest.mark.usefixtures("traced")
@pytest.mark.slow
def test_products_with_quantized_weights_stay_what_they_are(tmp_path):
    source = make_model(tmp_path / "source", "qwen2", hidden_size=64, intermediate_size=96)
    quantize_folder(source, tmp_path / "model", tmp_path / "twin", *W8A8)
    assert isinstance(load(tmp_path / "model").model.layers[0].self_attn.qkv_proj.kernel, Integers)
    check_same_logits(tmp_path / "model")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["traced", "inductor"])
def test_two_ranks_have_the_logits_of_one_also_with_experts(backend, folder_of, request):
    request.getfixturevalue(backend)
    folder, ranks = folder_of("qwen3_moe"), make_plans(2)
    expected = logits(load(folder))
    parts = on_all(ranks, lambda rank: load_compiled(folder, ranks[rank]))
    for found in on_all(ranks, lambda rank: logits(parts[rank])):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.usefixtures("inductor")
def test_an_engine_compiles_before_its_first_request_and_then_says_the_same_also_from_graphs(
    folder_of, monkeypatch, caplog
):
    folder, device = folder_of("llama"), LateDevice()
    batches = [requests(count, 97, logprobs=2) for count in (8, 1)]
    expected = [generate(folder, "cpu", wanted) for wanted in batches]
    monkeypatch.setattr(dispatch, "cpu_kernels", lambda dtype, device: False)  # they know no padding
    monkeypatch.setattr("engine.runner.rank_setup.open_device", lambda name: device)
    caplog.set_level(logging.INFO, logger="engine")
    core = make_core(folder, "cpu", torch_compile=True)
    lines = [record.message for record in caplog.records if record.name == "engine.runner.graphs.torch_compile"]
    with dynamo_config.patch(error_on_recompile=True):
        for wanted, answers in zip(batches, expected, strict=True):
            check_same(run(core, wanted), answers, 1e-4)
    core.close()
    assert {1, 8} < set(device.replays), "and steps with prompts"
    assert "torch.compile is on" in lines[0] and "has compiled layers=3 seconds=" in lines[1]


@pytest.mark.usefixtures("inductor")
def test_without_a_compiler_the_engine_does_not_start_and_says_what_is_missing(folder_of):
    there_is_none = inductor_config.patch({"cpp.cxx": ("/no/such/compiler",), "force_disable_caches": True})
    with there_is_none, pytest.raises(StartupError, match=r"torch_compile is on, but .*No working C\+\+ compiler"):
        make_core(folder_of("llama"), "cpu", torch_compile=True)


def test_enforce_eager_sets_torch_compile_aside(folder_of, caplog):
    caplog.set_level(logging.INFO, logger="engine.runner")
    core = build_engine(
        EngineConfig(model=str(folder_of("llama")), torch_compile=True, enforce_eager=True, num_gpu_blocks_override=8)
    )
    core.close()
    assert "torch_compile has no effect, because enforce_eager is set" in caplog.text
    assert "forward" not in vars(core.ranks.runner.model.layers[0])
