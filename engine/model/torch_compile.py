"""torch.compile for what stands between the attentions of a model. An option; without it the same code runs as it is.

Attention stays outside, with the rotary embedding and the KV write: it has to know the batch, and has kernels of its
own. So each layer is two pieces (models/llama.py), compiled once for all layers of a kind: for any number of tokens,
and, since torch.compile sets it apart, for one token. In the pieces norms and activations are the plain ones, which
Inductor fuses with each other and with what stands around them.

What torch.compile cannot look into, or should not, it takes as a call (`Hidden`): products with quantized weights and
with those packed for oneDNN, experts, whose tokens the host may count, and sums over ranks.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import TorchDynamoException
from torch._inductor import config as inductor_config

from engine.distributed.tp_group import TPGroup
from engine.errors import StartupError
from engine.model.config import ModelConfig
from engine.model.layers.linear import Linear, RowParallelLinear
from engine.model.layers.mlp import GatedMLP
from engine.model.layers.moe import MixtureOfExperts
from engine.model.layers.norm import RMSNorm
from engine.model.models.llama import Model
from engine.model.ops import activation, linear, norm

logger = logging.getLogger(__name__)

# of the steps that compile the pieces; 61 stands for any number, and is no width of a model: torch.compile takes sizes
# that are equal in the first call for the same size
TOKENS = (61, 1)
# of a piece, in a process that may make one engine after the other; what is beyond torch's own limit of 8 fails
MAX_VERSIONS = 256

_numbers = itertools.count()
_hidden: WeakValueDictionary[int, Hidden] = WeakValueDictionary()


class Hidden:
    """A call that is a node of torch.compile's graph, whatever happens inside.

    call: x [tokens, inputs] and other tensors, or None -> [tokens, outputs], a new tensor of x's dtype.
    outputs: None for as many as x has inputs.
    """

    def __init__(self, call: Callable[..., Tensor], outputs: int | None = None):
        self.call, self.outputs = call, outputs
        # in a tensor, since torch.compile makes constants of plain numbers, and would compile each layer by itself
        self.number = torch.tensor(next(_numbers), device="cpu")
        _hidden[int(self.number)] = self

    def __call__(self, x: Tensor, *others: Tensor | None) -> Tensor:
        return torch.ops.manta.hidden(x, others, self.number, x.shape[1] if self.outputs is None else self.outputs)


@torch.library.custom_op("manta::hidden", mutates_args=())
def call_hidden(x: Tensor, others: list[Tensor | None], number: Tensor, outputs: int) -> Tensor:
    return _hidden[int(number)].call(x, *others).contiguous()


@call_hidden.register_fake
def shape_of_hidden(x: Tensor, others: list[Tensor | None], number: Tensor, outputs: int) -> Tensor:
    return x.new_empty(x.shape[0], outputs)


class HiddenExperts(nn.Module):
    def __init__(self, experts: MixtureOfExperts):
        super().__init__()
        self.experts = experts
        self.hidden = Hidden(experts)

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(x)


class HiddenSums(TPGroup):
    """`all_reduce` of a group, as the pieces may call it."""

    def __init__(self, tp: TPGroup):
        super().__init__(tp.rank, tp.size)
        self.sum = Hidden(lambda x: tp.all_reduce(x.clone()))  # which overwrites it

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.sum(x)


def compile_layers(model: Model, cfg: ModelConfig, tp: TPGroup, run_step: Callable[[int], None]) -> None:
    """Compile the pieces of a model whose weights are packed, by steps of a few numbers of tokens.

    Raises StartupError where torch cannot compile, as without a C++ compiler.
    """
    started = time.monotonic()
    logger.info("torch.compile is on: compiling what stands between attentions, which takes a while")
    for layer in model.layers:
        prepare(layer, cfg, tp)
        for piece in ("before_attention", "after_attention"):
            setattr(layer, piece, torch.compile(getattr(layer, piece), dynamic=True, fullgraph=True))
    dynamo_config.recompile_limit = MAX_VERSIONS
    try:
        # in this process: Inductor's own workers would stay for as long as the engine does
        with inductor_config.patch(compile_threads=1):
            for tokens in TOKENS:
                run_step(tokens)
    except TorchDynamoException as error:
        why = str(error).strip().splitlines()[0]
        raise StartupError(f"torch_compile is on, but torch cannot compile here: {why}") from error
    logger.info("torch.compile has compiled layers=%d seconds=%.1f", len(model.layers), time.monotonic() - started)


def prepare(layer: nn.Module, cfg: ModelConfig, tp: TPGroup) -> None:
    """Plain operations where Inductor can fuse them, and calls where it must not look."""
    sums = tp if tp.size == 1 else HiddenSums(tp)
    if isinstance(layer.mlp, MixtureOfExperts):
        layer.mlp = HiddenExperts(layer.mlp)
    for module in layer.modules():
        if isinstance(module, RMSNorm):
            module.rms_norm, module.add_rms_norm = norm.rms_norm_plain, norm.add_rms_norm_plain
        if isinstance(module, GatedMLP):
            module.activation = activation.PLAIN[cfg.activation]
        if isinstance(module, RowParallelLinear):
            module.tp = sums
        if isinstance(module, Linear):
            hide_kernel(module)


def hide_kernel(linear_layer: Linear) -> None:
    if linear_layer.kernel is not None:
        linear_layer.kernel = Hidden(linear_layer.kernel, linear_layer.outputs)
    elif linear_layer.weight is not None and linear_layer.weight.is_mkldnn:
        weight = linear_layer.weight
        linear_layer.kernel = Hidden(lambda x, bias: linear.linear(x, weight, bias), linear_layer.outputs)
