"""Plain torch for each of our own kernels: what a trial compares the kernel with (engine/kernel_trial)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from engine.model.batch import Batch
from engine.model.layers.latent_attention import rotate
from engine.model.ops import attention as plain_attention
from engine.model.ops import moe
from engine.model.ops import sampling as plain_sampling
from engine.model.ops.elementwise import activations, norms
from engine.model.ops.elementwise import gates as gates_ops
from engine.model.ops.gpu import activation, fused_quantize, latent_attention, latent_rope, logits, sampling
from engine.model.ops.gpu import norm as gpu_norm
from engine.model.ops.gpu.experts import grouped_mm, routing
from engine.model.ops.gpu.experts import moe as gpu_moe
from engine.model.ops.gpu.libraries import attention
from engine.model.ops.gpu.quantized_linear import BLOCK, BlockFP8, Int8, RowFP8
from engine.model.ops.gpu.recurrent import causal_conv, gates, linear_attention
from engine.model.ops.latent import attention as latent_plain
from engine.model.ops.logits.masks import apply_masks_plain
from engine.model.ops.logits.penalties import penalise_plain
from engine.model.ops.norm import add_rms_norm_plain, rms_norm_plain
from engine.model.ops.recurrent.causal_conv import causal_conv_plain
from engine.model.ops.recurrent.gates import gates_plain
from engine.model.ops.recurrent.linear_attention import linear_attention_plain
from engine.model.quantization.packed_experts import PackedExperts
from engine.model.quantization.rows import QuantizedRows, RowFormat
from engine.model.quantization.weight import quantize_rows
from engine.model.state import CHUNK, States

Op = Callable[..., Any]
Product = RowFP8 | BlockFP8 | Int8


def twin(kernel: Any) -> Op | None:
    """Return the plain version of a kernel of ours: a function, a function with a format of rows, or a product with a
    quantized weight. Returns None for anything else."""
    if isinstance(kernel, Product):
        return partial(multiply_plain, kernel)
    if isinstance(kernel, partial) and (plain := rounding_twins().get(kernel.func)) is not None:
        return partial(rounded, plain, **kernel.keywords)
    try:
        return twins().get(kernel)
    except TypeError:  # what cannot be hashed is no kernel
        return None


def name_of(kernel: Any) -> str:
    """Return the name under which a trial reports a kernel, such as `norm.rms_norm`."""
    kernel = kernel.func if isinstance(kernel, partial) else kernel
    owner = kernel if hasattr(kernel, "__name__") else type(kernel)
    return f"{owner.__module__.rpartition('.')[2]}.{owner.__name__}"


@cache
def twins() -> dict[Op, Op]:
    """Return the plain version of each kernel. A trial adds those of parts (TriedPart.twins)."""
    return {
        gpu_norm.rms_norm: rms_norm_plain,
        gpu_norm.add_rms_norm: add_rms_norm_plain,
        gpu_norm.gated_rms_norm: norms.gated_rms_norm_plain,
        **{kernel: activations.PLAIN[name] for name, kernel in activation.GATED.items()},
        activation.open_gate: gates_ops.open_gate,
        attention.rotate_and_write: plain_attention.rotate_and_write,
        attention.paged_attention: plain_attention.paged_attention,
        latent_rope.write_latent: latent_plain.write_latent,
        latent_rope.rotate_and_write_latent: rotate_and_write_latent_plain,
        latent_attention.latent_attention: latent_plain.latent_attention,
        causal_conv.causal_conv: causal_conv_plain,
        gates.gates: gates_plain,
        linear_attention.linear_attention: linear_attention_twin,
        routing.top_k_softmax: moe.top_k_softmax_plain,
        routing.top_k_sigmoid: moe.top_k_sigmoid_plain,
        routing.top_k_of_groups: moe.top_k_of_groups_plain,
        routing.add_shared: moe.add_shared_plain,
        gpu_moe.mix_experts: mix_experts_plain,
        gpu_moe.mix_some_experts: mix_experts_plain,
        grouped_mm.mix_experts: mix_experts_plain,
        grouped_mm.mix_some_experts: mix_experts_plain,
        logits.apply_masks: apply_masks_plain,
        logits.penalise: penalise_plain,
        sampling.sample_rows: partial(plain_sampling.sample_rows_plain, plain_sampling.draw_rows_plain),
    }


@cache
def rounding_twins() -> dict[Op, Op]:
    """Return, for each kernel that also rounds its result for the next product, the plain version that does not."""
    return {
        fused_quantize.rms_norm: rms_norm_plain,
        fused_quantize.add_rms_norm: add_rms_norm_plain,
        **{kernel: activations.PLAIN[name] for name, kernel in fused_quantize.GATED.items()},
    }


def rounded(plain: Op, *args: Any, format: RowFormat) -> Any:
    """Compute `plain`, and round its result, or the last of its results, to a format of rows."""
    found = plain(*args)
    *others, rows = found if isinstance(found, tuple) else (found,)
    result = QuantizedRows(*quantize_rows(rows, format.dtype, format.group_size), len(rows), rows.dtype)
    return (*others, result) if others else result


def multiply_plain(product: Product, x: Tensor | QuantizedRows, bias: Tensor | None) -> Tensor:
    """Multiply in float32 what rows and weight stand for."""
    if not isinstance(x, QuantizedRows):
        dtype, group_size = product.format
        x = QuantizedRows(*quantize_rows(x, dtype, group_size), len(x), x.dtype)
    weight = product.values.float()  # [inputs, outputs]
    if isinstance(product, BlockFP8):
        blocks = product.scale[: len(weight) // BLOCK]  # without padding
        weight = weight * blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    else:
        weight = weight * product.scale
    out = x.dequantize() @ weight
    return (out if bias is None else out + bias.float()).to(x.dtype)


def mix_experts_plain(
    x: Tensor, gate_up: Tensor | PackedExperts, down: Tensor | PackedExperts, activation: Op, experts: Tensor,
    weights: Tensor, biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Compute experts whose weights are dequantized first. Rows are not rounded."""
    first, second = (w if isinstance(w, Tensor) else w.dequantize(x.dtype) for w in (gate_up, down))
    return moe.mix_experts_plain(x, first, second, activation, experts, weights, biases)


def linear_attention_twin(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, states: States, batch: Batch, *options: Any
) -> Tensor:
    """Compute linear attention on states as the kernel keeps them, with the decay of each row in place of the sum."""
    single = states["decays"]
    sums = single.cumsum(2)
    out = linear_attention_plain(q, k, v, decay, beta, {**states, "decays": sums}, batch, *options)
    single.copy_(sums.diff(dim=2, prepend=torch.zeros_like(sums[:, :, :1])))
    return out


def states_read(args: tuple[Any, ...]) -> list[Tensor]:
    """Return what later steps read of the states of linear attention, after a call with these arguments: the state of
    a sequence that has passed a border, and its rows after the last border."""
    *_, states, batch, _, _ = args
    found: list[Tensor] = []
    for slot, length in zip(batch.states.slots.tolist(), batch.kv_len.tolist(), strict=True):
        found += [states[name][slot, :, : length % CHUNK] for name in ("keys", "values", "decays")]
        found += [states["state"][slot]] if length >= CHUNK else []
    return found


MEANINGS: dict[Op, Callable[[tuple[Any, ...]], list[Tensor]]] = {linear_attention.linear_attention: states_read}
"""For kernels that may leave anything in parts of their arguments, what the others read of them."""


def rotate_and_write_latent_plain(
    out: Tensor, q: Tensor, c: Tensor, k: Tensor, norm: tuple[Tensor, float], table: Tensor, interleaved: bool,
    batch: Batch, layer: int,
) -> None:  # fmt: skip
    """Rotate q [tokens, heads, rope_dim] into the last values of out. Norm c [tokens, rank], and write it and the
    rotated k [tokens, rope_dim] to the cache."""
    weight, eps = norm
    out[..., -q.shape[-1] :] = rotate(q, table, batch, interleaved)
    latent = rms_norm_plain(c, weight, eps, 0.0)
    rotated = rotate(k[:, None], table, batch, interleaved)[:, 0]
    latent_plain.write_latent(torch.cat((latent, rotated), dim=-1), batch, layer)
