"""Time that a step of an engine takes, by the work in it: measured, or computed from data sheets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from engine.errors import InvalidParameter
from engine.model.config import DTYPES, ModelConfig
from engine.model.state import state_specs
from engine.wire.plan import StepPlan

COMPUTE_FRACTION = 0.6  # of the dense peak that large matrix products reach
ATTENTION_FRACTION = 0.4  # of the dense peak that attention over long prompts reaches
MEMORY_FRACTION = 0.8  # of the memory bandwidth that a decode step reaches
TP_FRACTION = 0.9  # of the speed per rank remains with each doubling of ranks, because of all-reduces
STEP_S = 0.002  # per step besides the model: planning, launching, sampling
SEQUENCE_S = 5e-6
USABLE = 0.9  # of the memory, like `gpu_memory_utilization`; activations take a fraction of it
ACTIVATIONS = 0.05


class LayerKind(NamedTuple):
    """Attention layers that all see the same number of tokens."""

    window: int | None  #: tokens that a token sees, itself included; None for all before it
    pairs: float  #: fraction of the model's `pair_flops`
    kv: float  #: fraction of the model's `kv_bytes`

    def seen(self, start: int, count: int) -> tuple[int, int]:
        """Return two numbers for the `count` tokens of a sequence from `start` on: the tokens that each attends to,
        summed up, and the tokens whose KV is read."""
        end, window = start + count, self.window
        if window is None or end <= window:
            return count * start + count * (count + 1) // 2, end
        few = max(0, window - start)  # tokens that see all before them
        return few * start + few * (few + 1) // 2 + (count - few) * window, end - max(0, start - window + 1)


@dataclass(frozen=True, slots=True)
class Layers:
    """The part of a sequence that a model's layers read in a step. By default, all layers see all tokens."""

    kinds: tuple[LayerKind, ...] = (LayerKind(None, 1.0, 1.0),)
    state: float = 0.0  #: bytes of a sequence's recurrent states, with the rows since a border, in KV of a token
    snapshot: float = 0.0  #: bytes of a snapshot of these states, in KV of a token

    @classmethod
    def of(cls, cfg: ModelConfig) -> Layers:
        if not differs(cfg):
            return ALIKE
        item, total, reading = DTYPES[cfg.dtype], cfg.kv_bytes_per_token(DTYPES[cfg.dtype]), layers_reading(cfg)
        pairs = sum(count * group.spec.head_dim for count, group in zip(reading, cfg.kv_groups, strict=True))
        kinds = tuple(
            LayerKind(group.spec.window, count * group.spec.head_dim / pairs, item * group.token_numbers() / total)
            for count, group in zip(reading, cfg.kv_groups, strict=True)
        )
        specs = state_specs(cfg.recurrent, cfg.dtype)
        kept = sum(spec.kept_bytes for spec in specs)
        return cls(kinds, (kept + sum(spec.row_bytes for spec in specs) / 2) / total, kept / total)

    @property
    def alike(self) -> bool:
        return not self.state and len(self.kinds) == 1 and self.kinds[0].window is None

    def seen(self, start: int, count: int) -> tuple[float, float]:
        """Return `pairs` and `context` (see Work) of the `count` tokens of a sequence from `start` on."""
        pairs, context = 0.0, self.state
        for kind in self.kinds:
            own_pairs, own_context = kind.seen(start, count)
            pairs += kind.pairs * own_pairs
            context += kind.kv * own_context
        return pairs, context

    def handed_over(self, start: int, stop: int, skip: int, end: int) -> float:
        """Return how much KV a handoff of the tokens from `skip` to `end` reads once the tokens from `start` to `stop`
        are ready. The unit is the KV of one token in all layers. States, and the part of the prompt that windows see,
        are read at the end of the prompt."""
        total = 0.0
        for kind in self.kinds:
            if kind.window is None:
                total += kind.kv * (stop - start)
            elif stop == end:
                total += kind.kv * (end - max(skip, end - kind.window + 1, 0))
        return total + (self.snapshot if stop == end else 0.0)


ALIKE = Layers()


class Work(NamedTuple):
    """The work of one step."""

    tokens: int  #: computed tokens
    sequences: int  #: sequences to which they belong
    pairs: float
    """For each computed token, the number of tokens that it attends to, itself included; summed over tokens, averaged
    over layers."""
    context: float  #: tokens whose KV is read, once for each sequence; mean of all layers, and states as KV

    @classmethod
    def of(cls, plan: StepPlan, layers: Layers = ALIKE) -> Work:
        pairs = context = 0.0
        for start, count in zip(plan.starts, plan.counts, strict=True):
            own_pairs, own_context = layers.seen(start, count)
            pairs += own_pairs
            context += own_context
        return cls(sum(plan.counts), len(plan.counts), pairs, context)


def differs(cfg: ModelConfig) -> bool:
    """Return whether any layer keeps something other than the KV of all tokens."""
    return cfg.recurrent is not None or any(group.spec.window is not None for group in cfg.kv_groups)


def layers_reading(cfg: ModelConfig) -> list[int]:
    """Return how many layers read the KV of each group. Some layers read the KV of another layer."""
    specs = cfg.kv_specs
    owners = [spec if isinstance(spec, int) else layer for layer, spec in enumerate(specs) if spec is not None]
    return [sum(owner in group.layers for owner in owners) for group in cfg.kv_groups]


class CostModel(Protocol):
    def seconds(self, tokens: int, sequences: int, pairs: float, context: float) -> float:
        """Return the time of a step. The arguments are the fields of a Work, separately, because this is called for
        every step."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """Cost model in which a step takes its compute time or its memory time, whichever is longer (Williams et al. 2009),
    plus fixed costs."""

    step_s: float  #: per step: planning, launching kernels
    sequence_s: float  #: per sequence: planning, sampling
    token_s: float  #: to compute a token
    pair_s: float  #: to compute an attended pair
    weights_s: float  #: to read all weights, once per step
    context_s: float  #: to read the KV of a token

    def seconds(self, tokens: int, sequences: int, pairs: float, context: float) -> float:
        compute = self.token_s * tokens + self.pair_s * pairs
        memory = self.weights_s + self.context_s * context
        return self.step_s + self.sequence_s * sequences + (compute if compute > memory else memory)


@dataclass(frozen=True, slots=True)
class LinearCostModel:
    """Cost model that is a sum of terms measured on an engine. It is for hardware without a known peak rate, such as
    CPUs."""

    step_s: float
    token_s: float
    sequence_s: float
    pair_s: float
    context_s: float

    def seconds(self, tokens: int, sequences: int, pairs: float, context: float) -> float:
        return (
            self.step_s
            + self.token_s * tokens
            + self.sequence_s * sequences
            + self.pair_s * pairs
            + self.context_s * context
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """Content of a cost file: costs measured on an engine."""

    cost: LinearCostModel
    request_s: float | None = None  #: time to the first token outside of steps; None if not measured


def read_cost(path: Path) -> Measured:
    """Read a cost file. Raises InvalidParameter."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Measured)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        limit = f"a file written by `python -m benchmarks.simulator.fit` ({error})"
        raise InvalidParameter("--cost", str(path), limit) from None


# -- data sheets -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Card:
    """Figures from the data sheet of a GPU."""

    flops: float  #: per second, dense, bfloat16
    bandwidth: float  #: memory bandwidth, bytes per second
    memory: float  #: bytes
    network: float  #: bytes per second that one card can send to another machine through its own NIC
    host: float  #: bytes per second between the card and host memory, in each direction
    peers: float  #: bytes per second that one card can send to others in its machine


CARDS = {
    "a100": Card(312e12, 2.039e12, 80e9, 25e9, 25e9, 300e9),  # SXM 80 GB, 200 Gb/s, PCIe 4, NVLink 3
    "h100": Card(989e12, 3.35e12, 80e9, 50e9, 50e9, 450e9),  # SXM, 400 Gb/s, PCIe 5, NVLink 4
    "h200": Card(989e12, 4.8e12, 141e9, 50e9, 50e9, 450e9),
    "l4": Card(121e12, 0.3e12, 24e9, 3.1e9, 25e9, 25e9),  # 25 Gb/s, PCIe 4, no NVLink
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model that determine the cost of its steps."""

    parameters: float
    active: float  #: parameters used per token; for a mixture of experts a part of all, although a batch reads all
    pair_flops: float  #: floating-point operations for a token to attend to one token, over all layers
    kv_bytes: float  #: bytes of a token's keys and values, over all layers
    weight_bytes: float
    heads: int
    kv_heads: int
    layers: int
    hidden: int
    config: ModelConfig | None = None  #: of a model folder

    @classmethod
    def dense(cls, parameters: float, layers: int, heads: int, kv_heads: int, head_dim: int) -> ModelShape:
        """Return the shape of a dense model in bfloat16."""
        kv_bytes = 2 * 2 * layers * kv_heads * head_dim
        pair_flops = 4.0 * layers * heads * head_dim
        sizes = heads, kv_heads, layers, heads * head_dim
        return cls(parameters, parameters, pair_flops, kv_bytes, 2 * parameters, *sizes)

    @classmethod
    def from_folder(cls, folder: Path) -> ModelShape:
        """Return the shape of the model in a folder, from its config.json. Raises ModelFolderError."""
        cfg = ModelConfig.from_folder(folder)
        attention = cfg.hidden_size * cfg.head_dim * (2 * cfg.num_heads + 2 * cfg.num_kv_heads)
        total = active = float(cfg.vocab_size * cfg.hidden_size)  # the head; looking up an embedding costs nothing
        for layer in range(cfg.num_layers):
            mlp = mlp_active = 3.0 * cfg.hidden_size * cfg.intermediate_size
            if cfg.moe is not None and layer in cfg.moe.layers:
                expert = 3.0 * cfg.hidden_size * cfg.moe.intermediate_size
                mlp, mlp_active = cfg.moe.num_experts * expert, cfg.moe.experts_per_token * expert
            total, active = total + attention + mlp, active + attention + mlp_active
        item = DTYPES[cfg.dtype]
        reading = zip(layers_reading(cfg), cfg.kv_groups, strict=True)
        pair_flops = 4.0 * cfg.num_heads * sum(layers * group.spec.head_dim for layers, group in reading)
        kv_bytes = cfg.kv_bytes_per_token(item)
        sizes = cfg.num_heads, cfg.num_kv_heads, cfg.num_layers, cfg.hidden_size
        return cls(total, active, pair_flops, kv_bytes, item * total, *sizes, cfg)


MODELS = {
    "llama-3.1-8b": ModelShape.dense(8.03e9, 32, 32, 8, 128),
    "llama-3.1-70b": ModelShape.dense(70.6e9, 80, 64, 8, 128),
    "qwen3-0.6b": ModelShape.dense(0.6e9, 28, 16, 8, 128),
    "qwen3-32b": ModelShape.dense(32.8e9, 64, 64, 8, 128),
    "opt-13b": ModelShape.dense(12.85e9, 40, 40, 40, 128),  # no grouped heads: DistServe's first figure has it
}


def find_model(name: str) -> ModelShape:
    """Return a model's shape. name: one of MODELS, or a model folder. Raises ServingError."""
    if name in MODELS:
        return MODELS[name]
    if Path(name, "config.json").is_file():
        return ModelShape.from_folder(Path(name))
    raise InvalidParameter("model", name, f"a folder with a config.json, or one of {', '.join(MODELS)}")


def find_card(name: str) -> Card:
    if name not in CARDS:
        raise InvalidParameter("card", name, f"one of {', '.join(CARDS)}")
    return CARDS[name]


def roofline(model: ModelShape, card: Card, tensor_parallel_size: int = 1) -> Roofline:
    """Return a cost model with round efficiency factors, which fit published measurements within some tens of percent.
    A cost model fitted to the engine itself is better."""
    ranks = tensor_parallel_size * TP_FRACTION ** (tensor_parallel_size.bit_length() - 1)
    return Roofline(
        step_s=STEP_S,
        sequence_s=SEQUENCE_S,
        token_s=2 * model.active / (card.flops * COMPUTE_FRACTION * ranks),
        pair_s=model.pair_flops / (card.flops * ATTENTION_FRACTION * ranks),
        weights_s=model.weight_bytes / (card.bandwidth * MEMORY_FRACTION * ranks),
        context_s=model.kv_bytes / (card.bandwidth * MEMORY_FRACTION * ranks),
    )


def usable_bytes(card: Card, tensor_parallel_size: int) -> float:
    """Return the memory of all ranks for weights and KV cache."""
    return tensor_parallel_size * card.memory * USABLE * (1 - ACTIVATIONS)


def kv_tokens(model: ModelShape, card: Card, tensor_parallel_size: int = 1) -> int:
    """Return the number of tokens whose KV fits into memory beside the weights. Raises InvalidParameter if the weights
    do not fit."""
    tokens = int((usable_bytes(card, tensor_parallel_size) - model.weight_bytes) / model.kv_bytes)
    if tokens < 1:
        need = model.weight_bytes / 1e9
        raise InvalidParameter(
            "tensor_parallel_size", tensor_parallel_size, f"enough cards for {need:.0f} GB of weights"
        )
    return tokens
