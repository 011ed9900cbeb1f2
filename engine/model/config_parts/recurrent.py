"""Reads the recurrent layers of a model from config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import ConfigError
from engine.model.checkpoint.fields import Fields, one_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentConfig:
    """Options of recurrent layers: Gated DeltaNet, Kimi Delta Attention, Mamba-2, or a convolution alone. Sizes are
    those of the whole model, not of one rank."""

    layers: tuple[int, ...]
    kernel: int
    """Number of tokens that the convolution reads, the current one included."""
    heads: int = 0
    """Number of value heads; 0 for a convolution alone."""
    key_heads: int = 0
    """Number of key and query heads; Mamba-2 calls them groups."""
    key_dim: int = 0
    """Size of a key; Mamba-2 calls it the size of the state."""
    value_dim: int = 0
    decay_dim: int = 1
    """Number of decays per head: one, or one per channel of a key."""
    channels: int = 0
    """Number of channels of a convolution alone."""
    conv_bias: bool = False
    proj_bias: bool = False
    out_bias: bool = False
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    gated_norm: bool = True
    """Whether Mamba-2's output is also normed, not only gated."""
    norm_before_gate: bool = False

    def heads_per_rank(self, tp_size: int) -> tuple[int, int]:
        """Return the number of value heads and of key heads on a rank. With too few key heads, ranks share them.

        Raises ConfigError if heads cannot be split over the ranks.
        """
        if self.heads % tp_size:
            raise ConfigError(
                "tensor_parallel_size", tp_size, f"a divisor of the {self.heads} heads of recurrent layers"
            )
        if self.key_heads % tp_size and tp_size % self.key_heads:
            limit = f"a divisor or a multiple of the {self.key_heads} key heads of recurrent layers"
            raise ConfigError("tensor_parallel_size", tp_size, limit)
        return self.heads // tp_size, max(1, self.key_heads // tp_size)

    def channels_per_rank(self, tp_size: int) -> int:
        """Return the number of channels that the convolution has on a rank."""
        if not self.heads:
            return self.channels // tp_size
        heads, key_heads = self.heads_per_rank(tp_size)
        return 2 * key_heads * self.key_dim + heads * self.value_dim

    @classmethod
    def read(cls, raw: Fields, num_layers: int) -> RecurrentConfig | None:
        """Return the options; None for a model without recurrent layers. raw: fields of config.json, with the family's
        `recurrent`, a key of READERS."""
        kind = raw.get("recurrent")
        if kind is None:
            return None
        types = block_types(raw, num_layers)
        layers = tuple(i for i, type in enumerate(types) if type in RECURRENT_TYPES)
        return READERS[kind](raw, layers) if layers else None


RECURRENT_TYPES = ("linear_attention", "mamba", "conv", "hybrid")
PATTERN = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}


def block_types(raw: Fields, num_layers: int) -> tuple[str, ...]:
    """Return the type of each layer: `attention`, `mlp`, `moe`, or one of RECURRENT_TYPES. `hybrid` has both attention
    and a recurrent part.

    Families list the layers' types, by name or by letter, or state the interval or the indices of attention layers.
    """
    if types := raw.get("layers_block_type") or raw.get("layer_types"):
        return tuple("attention" if type == "full_attention" else type for type in types)
    if pattern := raw.get("hybrid_override_pattern"):
        return tuple(PATTERN[letter] for letter in pattern)
    if interval := raw.get("full_attention_interval"):
        return tuple("linear_attention" if (i + 1) % interval else "attention" for i in range(num_layers))
    if (numbers := raw.get("attn_layer_indices", raw.get("full_attn_idxs"))) is not None:
        return tuple("attention" if i in numbers else "mamba" for i in range(num_layers))
    return ("hybrid",) * num_layers


def recurrent_names(raw: Fields) -> Fields:
    """Return the fields of families with recurrent layers under the names that other families use."""
    if raw.get("recurrent") == "short_conv":
        return lfm2_names(raw)
    if raw.get("recurrent") == "kimi_delta_attention":
        return kimi_names(raw)
    if raw.get("recurrent") == "nemotron_h":
        return nemotron_names(raw)
    if raw.get("shared_intermediate_size"):  # Granite 4: size of the shared experts, or of the only MLP
        if not raw.get("num_local_experts"):
            return raw | {"intermediate_size": raw["shared_intermediate_size"]}
        shared = raw["shared_intermediate_size"]
        return raw | {"shared_expert_intermediate_size": shared, "shared_gate": False}
    return raw


def nemotron_names(raw: Fields) -> Fields:
    one_of("mamba_hidden_act", raw.get("mamba_hidden_act", "silu"), ("silu",))
    types = block_types(raw, 0)
    raw = raw | {
        "num_hidden_layers": len(types),
        "rms_norm_eps": raw["layer_norm_epsilon"],
        "mlp_only_layers": [i for i, type in enumerate(types) if type != "moe"],
    }
    if "moe" in types:
        shared = raw["moe_shared_expert_intermediate_size"]
        return raw | {"shared_expert_intermediate_size": shared, "shared_gate": False, "shared_name": "shared_experts"}
    return raw | {"n_routed_experts": 0}


def lfm2_names(raw: Fields) -> Fields:
    one_of("use_expert_bias", raw.get("use_expert_bias", True), (True,))
    size = raw["block_ff_dim"] if "block_ff_dim" in raw else raw["intermediate_size"]
    if raw.get("block_auto_adjust_ff_dim"):
        size = int(raw.get("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
        size = -(-size // raw["block_multiple_of"]) * raw["block_multiple_of"]
    tied = raw.get("tie_embedding", raw["tie_word_embeddings"])
    raw = raw | {"intermediate_size": size, "tie_word_embeddings": tied, "rms_norm_eps": raw["norm_eps"]}
    if raw.get("sliding_window"):  # LFM3
        for key in ("use_sandwich_norm", "use_attention_gate"):
            one_of(key, raw.get(key, True), (True,))
        types = raw.get("layer_types") or lfm3_types(raw["num_hidden_layers"])
        raw = raw | {
            "layers_block_type": ["conv" if kind == "conv" else "full_attention" for kind in types],
            "layer_types": ["full_attention" if kind == "conv" else kind for kind in types],  # which have a window
        }
    return raw | {"first_k_dense_replace": raw.get("num_dense_layers", 0)}


def lfm3_types(num_layers: int) -> list[str]:
    kinds = ("sliding_attention", "conv", "full_attention", "conv")
    return [kinds[i % 4] if i else "conv" for i in range(num_layers)]


def kimi_names(raw: Fields) -> Fields:
    """Rename Kimi Linear's fields. The published config.json numbers layers from 1, in `linear_attn_config`."""
    linear, layers = raw.get("linear_attn_config"), raw["num_hidden_layers"]
    own = {
        "max_position_embeddings": raw["model_max_length"],
        "norm_topk_prob": raw["moe_renormalize"],
        "n_group": raw["num_expert_group"],
        "num_experts_per_tok": raw["num_experts_per_token"],
        "n_shared_experts": raw["num_shared_experts"],
    }
    if linear:
        full = set(linear["full_attn_layers"])
        own |= {
            "layer_types": ["full_attention" if i + 1 in full else "linear_attention" for i in range(layers)],
            "linear_head_dim": linear["head_dim"],
            "linear_num_heads": linear["num_heads"],
            "linear_conv_kernel_dim": linear["short_conv_kernel_size"],
        }
    return raw | own


def gated_delta_net(raw: Fields, layers: tuple[int, ...]) -> RecurrentConfig:
    return RecurrentConfig(
        layers=layers,
        kernel=raw["linear_conv_kernel_dim"],
        heads=raw["linear_num_value_heads"],
        key_heads=raw["linear_num_key_heads"],
        key_dim=raw["linear_key_head_dim"],
        value_dim=raw["linear_value_head_dim"],
    )


def kimi_delta_attention(raw: Fields, layers: tuple[int, ...]) -> RecurrentConfig:
    heads, size = raw["linear_num_heads"], raw["linear_head_dim"]
    return RecurrentConfig(
        layers=layers, kernel=raw["linear_conv_kernel_dim"], heads=heads, key_heads=heads, key_dim=size,
        value_dim=size, decay_dim=size,
    )  # fmt: skip


def mamba2(raw: Fields, layers: tuple[int, ...]) -> RecurrentConfig:
    heads, size = raw["mamba_n_heads"], raw.get("mamba_d_head", "auto")
    inner = raw.get("mamba_d_ssm") or raw["mamba_expand"] * raw["hidden_size"]
    bias = bool(raw.get("mamba_proj_bias"))
    return RecurrentConfig(
        layers=layers,
        kernel=raw["mamba_d_conv"],
        heads=heads,
        key_heads=raw["mamba_n_groups"],
        key_dim=raw["mamba_d_state"],
        value_dim=inner // heads if size == "auto" else size,
        conv_bias=raw["mamba_conv_bias"],
        proj_bias=bias,
        out_bias=bool(raw.get("projectors_bias", bias)),
        time_step_limit=limits(raw),
        gated_norm=raw.get("mamba_rms_norm", True),
        norm_before_gate=raw.get("mamba_norm_before_gate", False),
    )


def nemotron_h(raw: Fields, layers: tuple[int, ...]) -> RecurrentConfig:
    bias = raw.get("use_bias", False)
    return RecurrentConfig(
        layers=layers,
        kernel=raw["conv_kernel"],
        heads=raw["mamba_num_heads"],
        key_heads=raw["n_groups"],
        key_dim=raw["ssm_state_size"],
        value_dim=raw["mamba_head_dim"],
        conv_bias=raw.get("use_conv_bias", True),
        proj_bias=bias,
        out_bias=bias,
        time_step_limit=limits(raw),
    )


def short_conv(raw: Fields, layers: tuple[int, ...]) -> RecurrentConfig:
    bias = raw["conv_bias"]
    return RecurrentConfig(
        layers=layers, kernel=raw["conv_L_cache"], channels=raw["hidden_size"], conv_bias=bias, proj_bias=bias,
        out_bias=bias,
    )  # fmt: skip


def limits(raw: Fields) -> tuple[float, float]:
    """Return the smallest and the largest time step. transformers writes infinity as {"__float__": "Infinity"}."""
    low, high = raw.get("time_step_limit") or (0.0, float("inf"))
    return float(low), float("inf") if isinstance(high, dict) else float(high)


READERS: dict[str, Callable[[Fields, tuple[int, ...]], RecurrentConfig]] = {
    "gated_delta_net": gated_delta_net,
    "kimi_delta_attention": kimi_delta_attention,
    "mamba2": mamba2,
    "nemotron_h": nemotron_h,
    "short_conv": short_conv,
}
