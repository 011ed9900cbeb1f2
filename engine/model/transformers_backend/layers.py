"""Our layers in place of transformers' modules, which have a batch dimension of one: [1, tokens, size].

transformers' own plan (`base_model_tp_plan`) says which linear layers are split over the ranks. Every rank holds all
other layers whole, as it does modules that are not replaced.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.integrations.moe import _default_apply_gate

from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.config_parts.moe import MoEConfig
from engine.model.layers.embedding import LMHead, TiedLMHead, VocabEmbedding
from engine.model.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.model.layers.mlp import GatedMLP
from engine.model.layers.moe import Experts
from engine.model.layers.norm import RMSNorm
from engine.model.ops.elementwise import activations
from engine.model.ops.norm import rms_norm_plain
from engine.model.quantization.format import WeightFormat
from engine.model.quantization.online import Online
from engine.model.shard import Shard, ShardPlan, Shards, replicated

GATED = "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"  # a gated MLP, as transformers writes it
COLUMNS, ROWS = ("colwise",), ("rowwise", "rowwise_rep", "rowwise_split_input")
GATHERED = ("colwise_gather_output", "colwise_rep")
QKV = ("q", "k", "v")


class Column(ColumnParallelLinear):
    """A column-parallel layer: [..., inputs] -> [..., this rank's outputs], or with `gather` all outputs."""

    def __init__(self, outputs: Shard, inputs: int, bias: bool, format: WeightFormat | None, gather: ShardPlan | None):
        super().__init__(inputs, {"": outputs}, bias, format)
        self.gather = gather

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x.reshape(-1, x.shape[-1]))
        if self.gather is not None:
            out = self.gather.ranks.all_gather(out)
        return out.view(*x.shape[:-1], -1)

    def shards(self) -> Shards:
        return {name.removeprefix("."): shard for name, shard in super().shards().items()}


class MergedPart(nn.Module):
    """One of several merged linear layers: [..., inputs] -> [..., this rank's outputs of this layer]. transformers'
    code calls them one by one with the same input; the first call computes all."""

    def __init__(self, merged: MergedProduct, index: int):
        super().__init__()
        self.merged, self.index = merged, index

    def forward(self, x: Tensor) -> Tensor:
        return self.merged.part(x, self.index)


class MergedProduct:
    """The outputs of merged layers, kept until the last part is asked for. Not a module, since the parts share it."""

    def __init__(self, linear: ColumnParallelLinear):
        self.linear = linear
        self.sizes = [shard.size for shard in linear.biases.values()]
        self.input: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()

    def part(self, x: Tensor, index: int) -> Tensor:
        if x is not self.input:
            out = self.linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
            self.input, self.parts = x, out.split(self.sizes, -1)
        part = self.parts[index]
        if index == len(self.sizes) - 1:
            self.input, self.parts = None, ()
        return part


class RowLinear(RowParallelLinear):
    """A row-parallel layer: [..., inputs], or this rank's slice of them, -> [..., outputs], summed over the ranks."""

    def forward(self, x: Tensor) -> Tensor:
        own = self.weights[""]
        if x.shape[-1] > own.size:
            x = x[..., own.start : own.start + own.size]
        return super().forward(x.reshape(-1, own.size)).view(*x.shape[:-1], -1)


class MergedMLP(GatedMLP):
    """A gated MLP with merged gate and up projections: [..., hidden] -> [..., hidden]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).view(x.shape)


class Norm(RMSNorm):
    """RMSNorm over the last of any number of dimensions, scaled by `shift` + weight."""

    def __init__(self, size: int, eps: float, shift: float):
        super().__init__(size, eps)
        self.offset = shift

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        # heads of a merged projection cannot be viewed as rows: between tokens the stride spans other heads too
        heads = len(shape) == 4 and shape[0] == 1 and x.stride()[2:] == (shape[3], 1)
        rows = x[0] if heads else x.reshape(-1, shape[-1])
        return self.rms_norm(rows, self.weight, self.eps, self.offset).view(shape)


class Embedding(VocabEmbedding):
    """The embedding, times `scale`: [1, tokens] -> [1, tokens, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: ShardPlan, scale: float | None):
        super().__init__(vocab_size, hidden_size, tp)
        self.scale = None if scale is None else torch.tensor(scale, dtype=self.dtype, device="cpu").item()

    def forward(self, ids: Tensor) -> Tensor:
        rows = super().forward(ids.flatten()).view(*ids.shape, -1)
        return rows if self.scale is None else rows * self.scale


class BiasedHead(LMHead):
    """An LM head with a bias, which every rank holds whole."""

    bias: nn.Parameter

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + self.bias.float()

    def best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = self.forward(hidden).max(-1)
        return values, ids

    def shards(self) -> Shards:
        return super().shards() | {"bias": replicated(self.bias)}


class ModelHead(BiasedHead):
    def __init__(self, vocab_size: int, hidden_size: int, tp: ShardPlan, format: Online | None = None):
        super().__init__(vocab_size, hidden_size, tp, format)
        self.bias = nn.Parameter(torch.empty(vocab_size), requires_grad=False)


class TiedHead(BiasedHead, TiedLMHead):
    """A head with a bias that shares the embedding's matrix."""

    def __init__(self, embedding: VocabEmbedding, format: Online | None = None):
        TiedLMHead.__init__(self, embedding, format)
        self.bias = nn.Parameter(torch.empty(embedding.vocab_size), requires_grad=False)


class LayerMaker:
    """Makes our layers for modules of transformers."""

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, plan: Mapping[str, str], merged: Any, experts_per_token: int):
        """plan: transformers' style of parallelism by the path of a layer, with * for layer numbers.
        merged: returns whether the checkpoint stores each expert of a path separately."""
        self.cfg, self.tp, self.plan, self.merged, self.experts_per_token = cfg, tp, plan, merged, experts_per_token

    def make(self, path: str, module: nn.Module) -> nn.Module | None:
        """Return our layer for a module; None if there is none. Raises ConfigError if it cannot be split. path: as in
        the whole model, `model.layers.0.mlp.up_proj`."""
        if type(module) is nn.Linear:
            return self._linear(path, module)
        if (shift := rms_norm_shift(module)) is not None:
            norm: Any = module
            return Norm(norm.weight.shape[0], norm_eps(norm), shift)
        if is_gated_mlp(module, self.cfg.activation):
            gate: Any = module.gate_proj
            sizes = {"hidden_size": gate.in_features, "intermediate_size": gate.out_features}
            cfg = replace(self.cfg, **sizes, mlp_bias=gate.bias is not None)
            return MergedMLP(cfg, self.tp, path.removeprefix("model."))
        experts: Any = module
        if has_plain_experts(experts, self.cfg.activation):
            return self._experts(path, OurExperts, *experts.gate_up_proj.shape)
        if type(experts).__name__ == "Llama4TextExperts" and self.cfg.activation in activations.PLAIN:
            num_experts, hidden_size, twice = experts.gate_up_proj.shape
            return self._experts(path, Llama4Experts, num_experts, twice, hidden_size)
        return None

    def merge(self, path: str, module: nn.Module) -> ColumnParallelLinear | None:
        """Return a module's query, key and value projections as one layer; None if they cannot be merged."""
        linears = {name: getattr(module, f"{name}_proj", None) for name in QKV}
        some: list[Any] = [linear for linear in linears.values() if type(linear) is nn.Linear]
        if len(some) < len(QKV) or len({(linear.in_features, linear.bias is None) for linear in some}) > 1:
            return None
        outputs = {}
        for name, linear in zip(QKV, some, strict=True):
            style = self._style(f"{path}.{name}_proj")
            if style in ROWS + GATHERED:
                return None
            outputs[name] = self._outputs(f"{path}.{name}_proj", linear, style)
        try:
            format = self.cfg.weight_format(path.removeprefix("model."), *(f"{name}_proj" for name in QKV))
        except ConfigError:  # they differ
            return None
        return ColumnParallelLinear(some[0].in_features, outputs, some[0].bias is not None, format)

    def _linear(self, path: str, module: nn.Linear) -> nn.Module:
        style = self._style(path)
        prefix, _, name = path.removeprefix("model.").rpartition(".")
        # routers are not quantized, whether a checkpoint's rules leave them out or not
        format = None if name.endswith("gate") else self.cfg.weight_format(prefix, name)
        bias = module.bias is not None
        if style in ROWS:
            return RowLinear(module.in_features, module.out_features, self.tp, bias, format)
        gather = self.tp if style in GATHERED else None
        return Column(self._outputs(path, module, style), module.in_features, bias, format, gather)

    def _style(self, path: str) -> str | None:
        """Return how transformers' plan splits a layer; None if the plan does not split it. Raises ConfigError for an
        unknown style."""
        style = self.plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path)) if self.tp.size * self.tp.parts > 1 else None
        if style is None or style.startswith("replicated"):
            return None
        if style not in COLUMNS + GATHERED + ROWS:
            raise ConfigError(
                "tensor_parallel_size", self.tp.size, f"1: {path} is split by {style!r}, which is not known"
            )
        return style

    def _outputs(self, path: str, module: nn.Linear, style: str | None) -> Shard:
        """Return this rank's slice of a layer's outputs; all of them if `style` is None."""
        outputs, name = module.out_features, path.rpartition(".")[2]
        if style is None:
            return Shard((outputs,), 0, 0, outputs)
        kv_size = self.cfg.num_kv_heads * self.cfg.head_dim
        if name in ("k_proj", "v_proj") and outputs == kv_size and style in COLUMNS:
            first = self.tp.rank * self.cfg.num_kv_heads // self.tp.size
            size = self.cfg.kv_heads_per_rank(self.tp.size) * self.cfg.head_dim
            return Shard((outputs,), 0, first * self.cfg.head_dim, size)
        return Shard.of_rank((outputs,), 0, self.tp, f"{name} outputs")

    def _experts(self, path: str, cls: type[OurExperts], num_experts: int, twice: int, hidden_size: int) -> nn.Module:
        """Return our experts. twice: size of an expert's gate and up together."""
        moe = MoEConfig(
            num_experts=num_experts, experts_per_token=self.experts_per_token, intermediate_size=twice // 2,
            norm_topk_prob=False, layers=frozenset(),
        )  # fmt: skip
        if not self.merged(f"{path}.gate_up_proj"):
            made = cls(hidden_size, moe, self.cfg.activation, self.tp)
            made.stacked = True
            return made
        names = [f"{i}.{name}" for i in range(num_experts) for name in ("gate_proj", "up_proj", "down_proj")]
        format = self.cfg.weight_format(path.removeprefix("model."), *names)
        return cls(hidden_size, moe, self.cfg.activation, self.tp, format)


class OurExperts(Experts):
    """Our experts with transformers' interface: hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens,
    k] -> [tokens, hidden]."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, top_k_index, top_k_weights.to(hidden_states.dtype))


class Llama4Experts(OurExperts):
    """The experts of Llama 4, whose code in transformers computes every expert for every token.

    routed_in [experts * tokens, hidden], 0 where a token is not routed to an expert -> the same shape, in which the sum
    over experts is the result.
    """

    is_stored_transposed = True

    def __init__(self, hidden_size: int, moe: MoEConfig, activation: str, tp: ShardPlan):
        super().__init__(hidden_size, moe, activation, tp)
        self.num_experts, self.k = moe.num_experts, moe.experts_per_token

    @property
    def takes_addends(self) -> bool:
        """Whether `addends` can be added. With several experts per token, rows are not the step's tokens."""
        return super().takes_addends and self.k == 1

    def forward(self, routed_in: Tensor) -> Tensor:  # type: ignore[override]
        rows = routed_in.unflatten(0, (self.num_experts, -1)).transpose(0, 1)  # [tokens, experts, hidden]
        experts = torch.linalg.vector_norm(rows, torch.inf, dim=-1).topk(self.k, dim=1).indices
        chosen = rows.gather(1, experts[..., None].expand(-1, -1, rows.shape[2])).flatten(0, 1)
        pairs = experts.view(-1, 1)
        out = torch.zeros_like(routed_in).unflatten(0, (self.num_experts, -1))
        mixed = super().forward(chosen, pairs, torch.ones_like(pairs, dtype=chosen.dtype))
        out[: self.k] = mixed.unflatten(0, (-1, self.k)).transpose(0, 1)
        return out.flatten(0, 1)

    def shards(self) -> Shards:
        """Return the shards. The checkpoint stores these tensors transposed."""
        return {name: (shard.transposed(), target.mT) for name, (shard, target) in super().shards().items()}


def is_gated_mlp(module: nn.Module, name: str) -> bool:
    """Return whether a module is a gated MLP with the activation `name`. Compares its children and its source code."""
    linears = {"gate_proj", "up_proj", "down_proj"}
    parts = dict(module.named_children())
    if set(parts) != linears | {"act_fn"} or name not in activations.PLAIN:
        return False
    biases = {getattr(parts[part], "bias", None) is not None for part in linears}
    if any(type(parts[part]) is not nn.Linear for part in linears) or len(biases) > 1:
        return False
    body = inspect.getsource(type(module).forward).partition(":\n")[2].split()
    return " ".join(body) in (f"down_proj = {GATED} return down_proj", f"return {GATED}")


def has_plain_experts(module: Any, name: str) -> bool:
    """Return whether a module's experts are gated MLPs with the activation `name`, without biases."""
    return (
        name in activations.PLAIN
        and getattr(module, "has_gate", False)
        and not (module.has_bias or module.is_transposed or module.has_post_expert_norm)
        and module.is_concatenated
        and type(module)._apply_gate is _default_apply_gate
    )


def rms_norm_shift(module: nn.Module) -> float | None:
    """Return the number that a module adds to its weight if the module computes our RMSNorm in float32; else None.
    Found by trying, since every family of transformers has its own class."""
    weights = dict(module.named_parameters())
    if not type(module).__name__.endswith("RMSNorm") or list(weights) != ["weight"] or norm_eps(module) is None:
        return None
    if weights["weight"].dim() != 1 or list(module.buffers()):
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    size = weights["weight"].shape[0]
    weight = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")
    # the last rows are so small that eps matters
    scale = torch.tensor([[1.0], [1e-2], [1e-3]], device="cpu")
    x = torch.randn(3, size, generator=generator, dtype=torch.float32, device="cpu") * scale
    theirs = functional_call(module, {"weight": weight}, (x,))
    for shift in (0.0, 1.0):
        ours = rms_norm_plain(x, weight, norm_eps(module), shift)
        if isinstance(theirs, Tensor) and torch.allclose(theirs, ours, rtol=1e-4, atol=1e-6):
            return shift
    return None


def norm_eps(module: Any) -> Any:
    return getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
