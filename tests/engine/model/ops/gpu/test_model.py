"""Whole models on the Triton kernels, under the interpreter, against the same models on plain torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from engine.distributed.tp_group import TPGroup
from engine.model import fused_rows
from engine.model.config_parts.latent import LatentConfig
from engine.model.config_parts.moe import MoEConfig
from engine.model.config_parts.recurrent import RecurrentConfig
from engine.model.config_parts.rope import RopeConfig
from engine.model.layers.moe import Experts
from engine.model.loader import pack_weights
from engine.model.models.gpt_oss import GptOssExperts
from engine.model.models.registry import build_model
from engine.model.noise import fill_with_noise
from engine.model.ops import dispatch, quantized_linear
from engine.model.ops.gpu import quantized_linear as gpu_linear
from engine.model.quantization.mxfp4 import MXFP4
from engine.model.quantization.online import Online
from engine.model.quantization.packed_experts import PackedExperts
from engine.model.quantization.scheme import online
from engine.model.shard import ShardPlan
from tests.batches import ByHand
from tests.engine.model.model_configs import tiny_config
from tests.models import with_slow

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu runs whole models"),
]

FAMILIES = {
    "Qwen 3": tiny_config(architecture="Qwen3ForCausalLM"),
    "Qwen 3 MoE": tiny_config(
        architecture="Qwen3MoeForCausalLM",
        moe=MoEConfig(
            num_experts=6, experts_per_token=2, intermediate_size=20, norm_topk_prob=True, layers=frozenset({0})
        ),
    ),
    "Gemma 3": tiny_config(
        architecture="Gemma3ForCausalLM",
        activation="gelu_pytorch_tanh",
        num_layers=2,
        rope=(RopeConfig(), RopeConfig(theta=100.0)),
        window=(None, 3),
    ),
    "Gemma 2": tiny_config(
        architecture="Gemma2ForCausalLM",
        activation="gelu_pytorch_tanh",
        attn_logit_softcapping=1.0,
        final_logit_softcapping=2.0,
    ),
    "GLM 4.5": tiny_config(
        architecture="Glm4MoeForCausalLM",
        rope=(RopeConfig(partial_rotary_factor=0.5),),
        moe=MoEConfig(
            num_experts=6, experts_per_token=2, intermediate_size=20, norm_topk_prob=True, layers=frozenset({0}),
            scoring="sigmoid", num_groups=3, topk_groups=2, shared_intermediate_size=12,
        ),
    ),
    "Qwen 3.5": tiny_config(
        architecture="Qwen3_5ForCausalLM",
        num_layers=2,
        rope=(RopeConfig(partial_rotary_factor=0.5),) * 2,
        block_types=("linear_attention", "attention"),
        recurrent=RecurrentConfig(layers=(0,), kernel=4, heads=4, key_heads=2, key_dim=16, value_dim=16),
    ),
    "DeepSeek V2": tiny_config(
        architecture="DeepseekV2ForCausalLM",
        num_kv_heads=1,
        head_dim=24,
        latent=LatentConfig(rank=16, q_rank=None, nope_dim=8, rope_dim=8, value_dim=8, interleaved=True),
    ),
    "gpt-oss": tiny_config(
        architecture="GptOssForCausalLM",
        num_layers=2,
        rope=(RopeConfig(),) * 2,
        window=(3, None),
        qkv_bias=True,
        output_bias=True,
        moe=MoEConfig(
            num_experts=4, experts_per_token=2, intermediate_size=20, norm_topk_prob=True, layers=frozenset({0, 1}),
            router_bias=True,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", with_slow(FAMILIES, ("Qwen 3 MoE", "Gemma 3", "Gemma 2", "gpt-oss", "GLM 4.5")))
def test_a_model_on_the_kernels_gives_the_logits_of_plain_torch(family, monkeypatch):
    config = FAMILIES[family]
    monkeypatch.setattr(dispatch, "cpu_kernels", lambda dtype, device: False)
    plain = build_model(config, ShardPlan(), torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for parameter in plain.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    monkeypatch.setattr(dispatch, "gpu_kernels", lambda dtype, device: True)
    model = build_model(config, ShardPlan(), torch.float32, torch.device("cpu"))
    model.load_state_dict(plain.state_dict())
    if config.latent is not None:  # whose projections exist only once packed
        pack_weights(plain)
        pack_weights(model)

    runs = [ByHand(m, config, tp=ShardPlan()) for m in (plain, model)]
    for step in ({0: [5, 6, 7, 8, 9]}, {0: [1], 1: [2, 3]}, {0: [4], 1: [5]}):
        expected, found = (run.step(step) for run in runs)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


class Launches(TorchDispatchMode):
    """Counts kernels: Triton's, and torch's operations but for those that only make views or take memory."""

    NONE = ("empty", "detach", "_unsafe_view", "_to_copy")

    def __init__(self, monkeypatch):
        super().__init__()
        self.names: list[str] = []
        run = GridExecutor.__call__

        def launch(grid, *args, **options):
            self.names.append(grid.fn.__name__)
            with _disable_current_modes():
                run(grid, *args, **options)

        monkeypatch.setattr(GridExecutor, "__call__", launch)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view and not name.startswith(self.NONE):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_a_layer_is_nine_kernels_in_a_decode_step(architecture, monkeypatch):
    """Add and norm; q, k and v; norms of heads, rotation and KV; attention; o; add and norm; gate and up; activation;
    down."""
    monkeypatch.setattr(dispatch, "cpu_kernels", lambda dtype, device: False)
    monkeypatch.setattr(dispatch, "gpu_kernels", lambda dtype, device: True)
    launches, steps = Launches(monkeypatch), []
    for layers in (1, 3):
        config = tiny_config(
            architecture=architecture, num_layers=layers, rope=(RopeConfig(),) * layers, window=(None,) * layers
        )
        tp = ShardPlan()
        run = ByHand(build_model(config, tp, torch.float32, torch.device("cpu")), config, tp=tp)
        with launches:
            run.step({0: [5], 1: [6]})
        steps.append(launches.names)
        launches.names = []
    few, many = steps
    assert few.count("plan_kernel") == many.count("plan_kernel") == 1
    assert len(many) - len(few) == 2 * 9, Counter(many)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "fewer"), [("Llama", 3), ("DeepSeek V2", 2)])
def test_norms_and_activations_of_a_layer_with_int8_quantize_to_the_same_logits(family, fewer, monkeypatch):
    """Six kernels are ours: add, norm and quantize, twice; rotation and KV; attention; quantize; activation and
    quantize. Four products are torch's, each with a copy to as many rows as it takes, and two scalings. Latent
    attention reads the first norm's rows unquantized, too."""
    monkeypatch.setattr(dispatch, "cpu_kernels", lambda dtype, device: False)
    monkeypatch.setattr(dispatch, "gpu_kernels", lambda dtype, device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(quantized_linear, "select", gpu_linear.select)
    launches, steps, logits = Launches(monkeypatch), [], []
    for layers, fused in ((1, True), (2, True), (2, False)):
        config = replace(
            FAMILIES.get(family, tiny_config()),
            num_layers=layers,
            rope=(RopeConfig(),) * layers,
            window=(None,) * layers,
            quantization=online("int8"),
        )
        model = build_model(config, ShardPlan(), torch.bfloat16, torch.device("cpu"))
        fill_with_noise(model)
        pack_weights(model)
        if fused:
            fused_rows.fuse(model)
        run = ByHand(model, config, tp=ShardPlan())
        with launches:
            logits.append(run.step({0: [5], 1: [6]}))
        steps.append(launches.names)
        launches.names = []
    one, two, separate = steps
    assert torch.equal(logits[1], logits[2])
    assert len(separate) - len(two) == 2 * fewer
    assert family != "Llama" or len(two) - len(one) == 6 + 4 * 4, Counter(two) - Counter(one)


@pytest.mark.parametrize("quantization", with_slow([None, "fp8", "int8", "int4"], ("fp8", "int8", "int4")))
def test_a_sparse_layer_is_thirteen_kernels_in_a_decode_step_however_its_experts_are_stored(quantization, monkeypatch):
    """Those of a layer but for its MLP, which are six; the router's product, its choice, one that sorts, gate and up,
    activation, down, and the sum."""
    monkeypatch.setattr(dispatch, "cpu_kernels", lambda dtype, device: False)
    monkeypatch.setattr(dispatch, "gpu_kernels", lambda dtype, device: True)
    moe = replace(FAMILIES["Qwen 3 MoE"].moe, intermediate_size=128, layers=frozenset({0, 1}))
    config = replace(FAMILIES["Qwen 3 MoE"], hidden_size=128, moe=moe)
    launches, steps = Launches(monkeypatch), []
    for layers in (1, 2):
        config = replace(config, num_layers=layers, rope=(RopeConfig(),) * layers, window=(None,) * layers)
        tp = ShardPlan()
        model = build_model(config, tp, torch.float32, torch.device("cpu"))
        fill_with_noise(model)
        for module in model.modules():
            if isinstance(module, Experts) and quantization is not None:
                module.online = Online(quantization)
                module.pack()
                assert all(isinstance(weights, PackedExperts) for weights in module.kept[1:])
        run = ByHand(model, config, tp=tp)
        with launches:
            run.step({0: [5], 1: [6]})
        steps.append(launches.names)
        launches.names = []
    one, two = steps
    assert len(two) - len(one) == 13, Counter(two) - Counter(one)


@pytest.mark.parametrize("rank", [0, 1, None], ids=["rank 0", "rank 1", "one rank"])
def test_experts_in_mxfp4_stay_as_they_are_but_for_a_slice_that_cuts_a_group(rank, monkeypatch):
    moe = MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=96, norm_topk_prob=True, layers=frozenset())
    config = replace(FAMILIES["gpt-oss"], hidden_size=64, moe=moe)
    tp = ShardPlan(TPGroup.single() if rank is None else TPGroup(rank, 2))
    monkeypatch.setattr(dispatch, "cpu_kernels", lambda dtype, device: False)
    x, weights = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)), torch.full((5, 2), 0.5)
    results = []
    for kernels in (False, True):
        monkeypatch.setattr(dispatch, "gpu_kernels", lambda dtype, device, found=kernels: found)
        experts, generator = GptOssExperts(config, tp, MXFP4()), torch.Generator().manual_seed(1)
        for _, target in experts.shards().values():
            packed = target.dtype == torch.uint8
            values = torch.randint(116, 128, target.shape, generator=generator) if packed else torch.ones(target.shape)
            target.copy_(values)
        experts.pack()
        results += experts.partials(x, torch.tensor([[0, 1], [3, 1], [2, 3], [1, 0], [1, 2]]), weights)
    assert isinstance(experts.kept[1], PackedExperts)
    assert isinstance(experts.kept[2], PackedExperts if rank is None else torch.Tensor)  # 48 inputs
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-4)
