"""Compiles the layers of a model with torch.compile, as an option; without it the same code runs eagerly.

Each layer is compiled as a whole, once for all layers of a kind: for any number of tokens and, since torch.compile
treats it separately, for one token. Norms and activations are replaced by the plain ones, which Inductor fuses with
each other and with their neighbours. Code that torch.compile cannot or should not trace becomes an `OpaqueCall`:
attention, which needs the batch and has its own kernels; products with quantized or packed weights; experts, whose
tokens may be counted on the host; and sums over ranks.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import TorchDynamoException
from torch._inductor import config as inductor_config

from engine.distributed.tp_group import TPGroup
from engine.errors import StartupError
from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.layers.attention import Attention
from engine.model.layers.linear import Linear, RowParallelLinear
from engine.model.layers.mlp import GatedMLP
from engine.model.layers.moe import MixtureOfExperts
from engine.model.layers.norm import RMSNorm
from engine.model.models.llama import Model
from engine.model.ops import linear, norm
from engine.model.ops.elementwise import activations
from engine.model.shard import ShardPlan
from engine.user_folder import own_folder, user_folder

logger = logging.getLogger(__name__)

# Tokens in the steps that compile the layers. 61 represents any number. It must not equal a width of the model, since
# torch.compile treats sizes that are equal in the first call as one size.
TOKENS = (61, 1)
# Most versions of a layer in a process, which may make several engines. torch fails beyond its limit, by default 8.
MAX_VERSIONS = 256
CACHE_DIR = "TORCHINDUCTOR_CACHE_DIR"

_numbers = itertools.count()
_calls: WeakValueDictionary[int, OpaqueCall] = WeakValueDictionary()


class OpaqueCall(nn.Module):
    """A call that torch.compile does not trace: one node of its graph.

    call: takes x [tokens, ...] and other tensors or None, and returns a new tensor [tokens, outputs] of x's dtype.
    outputs: width of the result; None for the width of x.
    """

    def __init__(self, call: Callable[..., Tensor], outputs: int | None = None):
        super().__init__()
        self.call, self.outputs = call, outputs
        # a tensor, since torch.compile would make a plain number a constant and compile each layer separately
        self.number = torch.tensor(next(_numbers), device="cpu")
        _calls[int(self.number)] = self

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        """Yield a module that is called under the name of this one, which it has in the checkpoint."""
        of_call = self.call.named_modules if isinstance(self.call, nn.Module) else super().named_modules
        yield from of_call(memo, prefix, remove_duplicate)

    def forward(self, x: Tensor, *others: Tensor | None) -> Tensor:
        return torch.ops.manta.opaque_call(x, others, self.number, self.outputs or x.shape[1])


@torch.library.custom_op("manta::opaque_call", mutates_args=(), tags=(torch.Tag.needs_exact_strides,))
def opaque_call(x: Tensor, others: list[Tensor | None], number: Tensor, outputs: int) -> Tensor:
    return _calls[int(number)].call(x, *others).contiguous()


@opaque_call.register_fake
def shape_of_opaque_call(x: Tensor, others: list[Tensor | None], number: Tensor, outputs: int) -> Tensor:
    return x.new_empty(x.shape[0], outputs)


class OpaqueAttention(nn.Module):
    """Attention that takes the batch from an attribute, since a graph's nodes cannot have a batch as argument. May
    overwrite q and k, which no other node reads."""

    def __init__(self, attention: Attention, outputs: int):
        super().__init__()
        self.batch: Batch | None = None
        self.call = OpaqueCall(lambda q, k, v: attention(q, k, v, self.batch), outputs)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, norms: norm.HeadNorms | None = None) -> Tensor:
        if norms is not None:
            q, k = norms.apply(norm.rms_norm_plain, q, k)
        return self.call(q, k, v)


class OpaqueSums(TPGroup):
    """A group whose `all_reduce` can be called in compiled layers."""

    def __init__(self, tp: TPGroup):
        super().__init__(tp.rank, tp.size)
        self.opaque = OpaqueCall(lambda x: tp.all_reduce(x.clone()))  # all_reduce overwrites its argument

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.opaque(x)


def compile_layers(model: Model, cfg: ModelConfig, tp: TPGroup, run_step: Callable[[int], None]) -> None:
    """Compile the layers of a model with packed weights, by running steps of TOKENS tokens.

    Raises StartupError if torch cannot compile, for example without a C++ compiler.
    """
    started = time.monotonic()
    choose_cache()
    logger.info("torch.compile is on: compiling the layers, which takes a while")
    for layer in model.layers:
        prepare(layer, cfg, tp)
        compile_layer(layer)
    dynamo_config.recompile_limit = MAX_VERSIONS
    try:
        # compile in this process: Inductor's worker processes would live as long as the engine
        with inductor_config.patch(compile_threads=1):
            for tokens in TOKENS:
                run_step(tokens)
    except TorchDynamoException as error:
        why = str(error).strip().splitlines()[0]
        raise StartupError(f"torch_compile is on, but torch cannot compile here: {why}") from error
    logger.info("torch.compile has compiled layers=%d seconds=%.1f", len(model.layers), time.monotonic() - started)


def choose_cache() -> None:
    """Let Inductor keep its code in a folder of this user's, unless a variable names another one: its own, in /tmp, may
    be made by anybody, and it runs what it finds there. Raises StartupError."""
    folder = os.environ.get(CACHE_DIR) or str(user_folder("~/.cache/manta/inductor"))
    try:
        os.environ[CACHE_DIR] = str(own_folder(Path(folder), may_read=True))
    except OSError as error:
        raise StartupError(f"torch_compile is on, but its code cannot be kept ({CACHE_DIR}): {error}") from error


def compile_layer(layer: Any) -> None:
    """Compile the `forward` of a layer as a function of only x and the residual."""
    qkv_proj = layer.self_attn.qkv_proj
    attention = OpaqueAttention(layer.self_attn.attend, qkv_proj.heads * qkv_proj.head_dim)
    layer.self_attn.attend = attention
    compiled = torch.compile(layer.forward, dynamic=True, fullgraph=True)

    def forward(x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        attention.batch = batch
        return compiled(x, residual, None)

    layer.forward = forward


def prepare(layer: nn.Module, cfg: ModelConfig, tp: TPGroup) -> None:
    """Replace ops that Inductor can fuse by plain operations, and code that it must not trace by opaque calls."""
    sums = ShardPlan(tp if tp.size == 1 else OpaqueSums(tp))
    if isinstance(layer.mlp, MixtureOfExperts):
        layer.mlp = OpaqueCall(layer.mlp)
    for module in layer.modules():
        if isinstance(module, RMSNorm):
            module.rms_norm, module.add_rms_norm = norm.rms_norm_plain, norm.add_rms_norm_plain
        if isinstance(module, GatedMLP):
            module.activation = activations.PLAIN[cfg.activation]
        if isinstance(module, RowParallelLinear):
            module.tp = sums
        if isinstance(module, Linear) and module.kernel is not None:
            module.kernel = OpaqueCall(module.kernel, module.outputs)
        elif isinstance(module, Linear) and module.weight is not None and linear.is_packed(module.weight):
            call = lambda x, bias, weight=module.weight: linear.linear(x, weight, bias)  # noqa: E731
            module.kernel = OpaqueCall(call, module.outputs)
