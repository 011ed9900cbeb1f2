"""Compiles kernels for a GPU where there is none: python -m tests.engine.model.ops.gpu.compile_kernels CASE...

For Hopper (sm_90), or what is named before a case, like sm_80.

The launchers run as they are, over tensors on the CPU, but what they launch is only compiled, by the ptxas that comes
with Triton. Prints what each kernel needs, one JSON object per line. Not under the interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from engine.model import state
from engine.model.low_rank import AdapterRows, LowRankWeights
from engine.model.ops.gpu import (
    activation,
    attention,
    dependent_launch,
    fused_quantize,
    latent_attention,
    latent_rope,
    logits,
    low_rank,
    norm,
    quantize,
    rope,
    sampling,
)
from engine.model.ops.gpu.compile_target import CompileTarget
from engine.model.ops.gpu.experts import moe, routing
from engine.model.ops.gpu.recurrent import causal_conv, gates, linear_attention
from engine.model.ops.logits.penalties import Penalties
from engine.model.ops.norm import HeadNorms
from engine.model.quantization.packed_experts import PackedExperts
from engine.model.quantization.rows import RowFormat
from tests.engine.model.ops.gpu.paged import FLOAT8, Case, latent_inputs
from tests.state_batches import state_batch

DECODE, CHUNK = Case([(4000, 1)] * 3, heads=8, head_dim=128, block_size=64), Case([(0, 200)], heads=8, head_dim=128)
CASES: dict[str, Case] = {
    "rows": DECODE,
    "rows, float8": DECODE.but(cache_dtype=FLOAT8),
    "rows, head_dim 64": DECODE.but(head_dim=64),
    "rows, head_dim 256": DECODE.but(head_dim=256),
    "rows, a window": DECODE.but(window=512),
    "rows, float16": DECODE.but(dtype=torch.float16),
    "rows, 7 heads, blocks of 20": DECODE.but(heads=14, block_size=20),
    "rows, sinks and a window": DECODE.but(head_dim=64, sinks=True, window=128),
    "rows, partial rotary": DECODE.but(rotary_dim=96),
    "rows, capped scores": DECODE.but(head_dim=256, softcap=50.0),
    "chunk": CHUNK,
    "chunk, float8": CHUNK.but(cache_dtype=FLOAT8),
    "chunk, head_dim 64": CHUNK.but(head_dim=64),
    "chunk, head_dim 80": CHUNK.but(head_dim=80),
    "chunk, head_dim 256": CHUNK.but(head_dim=256),
    "chunk, a window": CHUNK.but(window=512),
    "chunk, 7 heads": CHUNK.but(heads=14),
    "chunk, sinks": CHUNK.but(head_dim=64, sinks=True),
    "chunk, capped scores": CHUNK.but(head_dim=256, softcap=50.0),
    "chunk, chunked attention": CHUNK.but(chunk=8192),
    "chunk, images and a window": CHUNK.but(head_dim=256, images=True, window=1024),
    "chunk over a long prefix": CHUNK.but(sequences=[(4000, 200)]),
    "rows, float32": DECODE.but(dtype=torch.float32),
    "chunk, float32": CHUNK.but(dtype=torch.float32),
    "short chunk": CHUNK.but(sequences=[(4000, 4)]),
}

EXPERTS = {"experts": torch.bfloat16, "experts, float16": torch.float16, "experts, float32": torch.float32}


class Driver(CompileTarget):
    """A GPU whose kernels are compiled. capability: of the GPU, times 10."""

    def __init__(self, capability: int):
        super().__init__(capability)
        attention.hopper = lambda device: capability in (90, 100)
        dependent_launch.supported = lambda device: capability >= 90
        moe.multiplies_float8 = lambda device: capability >= 89


def compile_only(kernel: JITFunction, grid: tuple[int, ...]) -> Any:
    def launch(*args: Any, **options: Any) -> None:
        compiled = kernel.warmup(*args, grid=grid, **options)
        used = resources(compiled.asm["cubin"])
        ptx = compiled.asm["ptx"]
        mma = "mma.sync" in ptx or "tcgen05.mma" in ptx  # the latter on Blackwell
        found = {"wgmma": "wgmma.mma_async" in ptx, "mma": mma, "async_copies": ptx.count("cp.async.cg")}
        found["dependent"] = compiled.metadata.launch_pdl
        assert found["dependent"] == ("griddepcontrol.wait" in ptx), "launched early, but does not wait"
        name = kernel.fn.__name__
        print(json.dumps({"kernel": name, "shared": compiled.metadata.shared, **used, **found}), flush=True)

    return launch


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, bytes of its stack, where registers are spilled, and instructions of the longest loop."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (dump(option, file.name) for option in ("--dump-resource-usage", "--dump-sass"))
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return {"registers": int(registers), "stack": int(stack), "loop": longest_loop(code)}


def dump(option: str, path: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout


def longest_loop(code: str) -> int:
    """Return the number of instructions between a branch back and its target, of the loop with most of them."""
    places = [int(place, 16) for place in re.findall(r"/\*([0-9a-f]{4,})\*/ +\S", code)]
    ends = [
        (int(place, 16), int(to, 16))
        for place, to in re.findall(r"/\*([0-9a-f]{4,})\*/[^;]*BRA[^;]* (0x[0-9a-f]+)", code)
    ]
    return max((sum(to <= place <= end for place in places) for end, to in ends if to < end), default=0)


def compile_attention(case: Case) -> None:
    q, k, v, batch = case.inputs()
    table = torch.zeros(8192, case.rotary_dim or case.head_dim, dtype=case.dtype)
    weight = table[0, :1].expand(case.head_dim).contiguous()
    for norms in (None, HeadNorms(weight, weight, 1e-6, 0.0)):
        rope.rotate_and_write(q, k, v, table, batch, 1, norms)
    attention.paged_attention(q, batch, 1, 0.1, case.window, **case.scores())


def compile_elementwise(float8: bool) -> None:
    x = torch.zeros(4, 8192, dtype=torch.bfloat16)
    activation.silu_mul(x)
    activation.gelu_tanh_mul(x)
    activation.swigluoai_mul(x)
    activation.open_gate(x, x.unflatten(1, (64, 128)))
    norm.rms_norm(x, x[0], 1e-6, 0.0)
    norm.add_rms_norm(x, x, x[0], 1e-6, 0.0)
    norm.rms_norm(x.unflatten(1, (64, 128)), x[0, :128], 1e-6, 1.0)
    column = torch.full((4, 1), 0.5)
    rows = torch.arange(3)
    sampling.sample_rows(x.float(), [])
    logits.apply_masks(x.float(), rows, torch.zeros(3, 1024, dtype=torch.uint8))
    penalties = Penalties(rows.expand(5, -1), column[:3].T.expand(3, -1), 3)
    logits.penalise(x.float(), penalties, torch.zeros(4, 4096, dtype=torch.int32))
    for format in (RowFormat(torch.int8), *([RowFormat(FLOAT8), RowFormat(FLOAT8, 128)] if float8 else [])):
        quantize.quantize(x, format)
        fused_quantize.rms_norm(x, x[0], 1e-6, 0.0, format)
        fused_quantize.add_rms_norm(x, x, x[0], 1e-6, 0.0, format)
        fused_quantize.silu_mul(x.repeat(1, 4), format)


PACKED_EXPERTS = ("mxfp4", "float8", "float8 in blocks", "int8", "int4")


def packed_experts(kind: str, outputs: int, inputs: int) -> PackedExperts:
    """Return the weights of four experts."""
    if kind == "mxfp4":
        sizes = (4, outputs, inputs // 32, 16), (4, outputs, inputs // 32)
        return PackedExperts(*(torch.zeros(size, dtype=torch.uint8) for size in sizes), None, inputs)
    groups = 1 if kind in ("float8", "int8") else inputs // 128
    scales, bits = torch.zeros(4, outputs, groups), 4 if kind == "int4" else 8
    values = torch.zeros(4, outputs, inputs * bits // 8, dtype=torch.int8 if kind == "int8" else torch.uint8)
    values = values.view(FLOAT8) if kind.startswith("float8") else values
    rounded = FLOAT8 if kind.startswith("float8") else None
    return PackedExperts(values, scales, scales if kind == "int4" else None, inputs, rounded)


def compile_packed_experts(kind: str) -> None:
    """Compile the kernels for the shapes of gpt-oss 20b, or of Qwen3 30B with a few experts."""
    hidden, size = (2880, 2880) if kind == "mxfp4" else (2048, 768)
    for tokens in (4, 400):
        x, experts = torch.zeros(tokens, hidden, dtype=torch.bfloat16), torch.zeros(tokens, 4, dtype=torch.int64)
        gate_up, down = packed_experts(kind, 2 * size, hidden), packed_experts(kind, hidden, size)
        biases = (x.new_zeros(4, 2 * size), x.new_zeros(4, hidden)) if kind == "mxfp4" else None
        act = activation.swigluoai_mul if kind == "mxfp4" else activation.silu_mul
        moe.mix_experts(x, gate_up, down, act, experts, experts.to(x.dtype), biases)


def compile_experts(dtype: torch.dtype) -> None:
    """For the few tokens of a decode step, and for the many of a prompt."""
    routing.top_k_softmax(torch.zeros(4, 128, dtype=dtype), 8, True)
    routing.top_k_sigmoid(torch.zeros(4, 256), torch.zeros(256), (8, 4), 8, True, 2.5, dtype)
    routing.top_k_of_groups(torch.zeros(4, 160), (8, 3), 6, 16.0, dtype)
    for gate in (None, torch.zeros(4, 8, dtype=dtype)[:, :1]):
        routing.add_shared(torch.zeros(4, 2048, dtype=dtype), torch.zeros(4, 2048, dtype=dtype), gate)
    routing.sort_pairs(torch.zeros(400, 8, dtype=torch.int64), 128, moe.MANY)
    routing.combine(torch.zeros(32, 2048, dtype=dtype), torch.zeros(4, 8), torch.zeros(32, dtype=torch.int64))
    routing.combine(torch.zeros(32, 2048, dtype=dtype), torch.zeros(4, 8), own=torch.zeros(4, 8, dtype=torch.bool))
    for tokens in (4, 400):
        x, experts = torch.zeros(tokens, 2048, dtype=dtype), torch.zeros(tokens, 8, dtype=torch.int64)
        gate_up, down = torch.zeros(16, 1536, 2048, dtype=dtype), torch.zeros(16, 2048, 768, dtype=dtype)
        moe.mix_experts(x, gate_up, down, activation.silu_mul, experts, experts.to(dtype))
        biases = gate_up[..., 0].contiguous(), down[..., 0].contiguous()
        moe.mix_experts(x, gate_up, down, activation.swigluoai_mul, experts, experts.to(dtype), biases)


def compile_recurrent() -> None:
    """Compile for shapes of Qwen3-Next, of Kimi Linear and of Nemotron-H, with fewer heads."""
    batch, x = state_batch([(0, 100, 30), (1, 7, 1)]), torch.zeros(31, 4096, dtype=torch.bfloat16)
    states = {"conv": torch.zeros(2, state.RING, 4096, dtype=torch.bfloat16)}
    causal_conv.causal_conv(x, x[:4].T.contiguous(), None, states, batch, True)
    gates.gates(x, x[:, :32], torch.zeros(32), torch.zeros(4096))
    norm.gated_rms_norm(x.unflatten(1, (32, 128)), x.unflatten(1, (32, 128)), x[0, :128], 1e-6, False)
    for heads, key_heads, value_dim, decay_dim, delta in (
        (4, 2, 128, 1, True),
        (4, 4, 128, 128, True),
        (8, 1, 64, 1, False),
    ):
        k, v = (
            x[:, : count * size].unflatten(1, (count, size)) for count, size in ((key_heads, 128), (heads, value_dim))
        )
        rows = {"keys": (key_heads, 128), "values": (heads, value_dim), "decays": (heads, decay_dim)}
        states = {name: torch.zeros(2, count, state.CHUNK, size) for name, (count, size) in rows.items()}
        states["state"] = torch.zeros(2, heads, 128, value_dim)
        decay, beta = torch.zeros(31, heads, decay_dim), torch.zeros(31, heads) if delta else None
        v = v if delta else v.float()
        linear_attention.linear_attention(k, k, v, decay, beta, states, batch, 0.1, 1e-6 if delta else None)


def compile_latent() -> None:
    """Compile for the shape of DeepSeek V2 Lite."""
    q, latent, batch = latent_inputs([(4000, 1), (4000, 30)], heads=16, rank=512, rope=64, dtype=torch.bfloat16)
    latent_rope.write_latent(latent, batch, 1)
    table, norm = torch.zeros(8192, 64, dtype=torch.bfloat16), (latent[0, :512].clone(), 1e-6)
    latent_rope.rotate_and_write_latent(
        q.clone(), q[..., 512:], latent[:, :512], latent[:, 512:], norm, table, True, batch, 1
    )
    latent_attention.latent_attention(q, batch, 1, 0.1, 512)


def compile_adapters() -> None:
    """Compile for one slice of outputs and for three, with ranks of 16 and more."""
    for rank, slices in ((16, [4096]), (48, [4096, 1024, 1024])):
        weights = LowRankWeights.allocate(4, 4096, slices, rank, torch.bfloat16, torch.device("cpu"))
        x, out = (torch.zeros(64, size, dtype=torch.bfloat16) for size in (4096, sum(slices)))
        low_rank.add([out], x, weights, AdapterRows(len(x), x.device))


if __name__ == "__main__":
    OTHERS = {"recurrent": compile_recurrent, "latent": compile_latent, "adapters": compile_adapters}
    driver.set_active(Driver(90))
    JITFunction.__getitem__ = compile_only
    for chosen in sys.argv[1:]:
        if chosen.startswith("sm_"):
            driver.set_active(Driver(int(chosen.removeprefix("sm_"))))
        elif chosen == "elementwise":
            compile_elementwise(driver.active.capability >= 89)
        elif chosen in OTHERS:
            OTHERS[chosen]()
        elif chosen.startswith("experts in "):
            compile_packed_experts(chosen.removeprefix("experts in "))
        elif chosen in EXPERTS:
            compile_experts(EXPERTS[chosen])
        else:
            compile_attention(CASES[chosen])
