"""Quantizes rows in the kernel that computes them, on a GPU: the norm before a quantized product, or the activation,
writes what the product reads. A layer of Llama with quantized weights then launches 10 kernels instead of 13."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from engine.model.layers.linear import Linear, Product
from engine.model.layers.mlp import GatedMLP
from engine.model.layers.norm import RMSNorm
from engine.model.models.llama import LlamaAttention, LlamaLayer
from engine.model.ops import dispatch
from engine.model.quantization.rows import RowFormat


def fuse(model: nn.Module) -> None:
    """Fuse the packed layers of a model, unless it has adapters, which need the rows unquantized."""
    if any(isinstance(layer, Product) and layer.addend is not None for layer in model.modules()):
        return
    for layer in model.modules():
        if isinstance(layer, LlamaLayer) and is_plain(type(layer)):
            if isinstance(layer.self_attn, LlamaAttention):
                fuse_norm(layer.input_layernorm, layer.self_attn.qkv_proj)
            if isinstance(layer.mlp, GatedMLP):
                fuse_norm(layer.post_attention_layernorm, layer.mlp.gate_up_proj)
        if isinstance(layer, GatedMLP) and (format := input_format(layer.down_proj)) is not None:
            fuse_activation(layer, format)


def is_plain(kind: type[LlamaLayer]) -> bool:
    """Return whether only a layer's attention and MLP read what its norms write."""
    return kind.forward is LlamaLayer.forward and kind.mix is LlamaLayer.mix


def fuse_activation(mlp: GatedMLP, format: RowFormat) -> None:
    """Have the activation of an MLP quantize its result, if there is a kernel that does both."""
    from engine.model.ops.gpu import activation, fused_quantize

    for name, kernel in fused_quantize.GATED.items():
        if mlp.activation is activation.GATED[name]:
            fused: Any = kernel  # whose result a layer hands on as if it were a tensor
            mlp.activation = partial(fused, format=format)


def fuse_norm(norm: RMSNorm, reader: Linear) -> None:
    """Have a norm quantize its result, which only `reader` reads."""
    if (format := input_format(reader)) is not None:
        from engine.model.ops.gpu import fused_quantize

        fused: Any = fused_quantize
        norm.rms_norm = partial(fused.rms_norm, format=format)
        norm.add_rms_norm = partial(fused.add_rms_norm, format=format)


def input_format(layer: Linear) -> RowFormat | None:
    """Return the format to which a layer's product quantizes rows; None if it does not quantize rows in our kernels."""
    if layer.kernel is None or not dispatch.gpu_kernels(layer.dtype, layer.device):
        return None
    return getattr(layer.kernel, "format", None)
