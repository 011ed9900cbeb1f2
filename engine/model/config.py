"""The shape of a model, read from the config.json of its folder. A field that would change the output and is not
supported is an error at start, never ignored.

Imports torch for quantized models only, so that reading a configuration stays fast.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from engine.errors import ConfigError, ModelFolderError
from engine.model import multipliers, recurrent_config
from engine.model.checkpoint.folder import as_token_ids, eos_token_ids, read_json, stored_dtype
from engine.model.families import VISION, Family, Head, find_family, head_of, text_part
from engine.model.kv_groups import KVCacheGroup, KVCacheSpec, LayerSpecs, group_layers, place_of
from engine.model.multipliers import Multipliers
from engine.model.pooling_config import PoolingConfig, PoolingType
from engine.model.quantization.unsupported import UnsupportedScheme
from engine.model.recurrent_config import RecurrentConfig
from engine.wire.pooling_params import SupportedTasks, Task

if TYPE_CHECKING:
    from engine.model.quantization.format import WeightFormat
    from engine.model.quantization.online import Online
    from engine.model.quantization.scheme import Scheme

Fields = dict[str, Any]
RopeType = Literal["default", "linear", "llama3", "yarn", "longrope", "none"]
ROPE_TYPES = get_args(RopeType)[:-1]  # the last is no type of config.json: nothing turns
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number
ENCODER_ACTIVATIONS = ("gelu",)
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # of gpt-oss; others are refused
# Fields of config.json that change the output when they are set, and that few families read.
WITH_KV = ("attention", "hybrid")  # of `block_types`
RARE = ("attn_logit_softcapping", "final_logit_softcapping")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One set of rotary frequencies. Fields after `factor` belong to one type each; see engine/model/layers/rope.py."""

    type: RopeType = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn, longrope)."""
    factors: tuple[float, ...] = ()
    """One for each wavelength (longrope)."""
    partial_rotary_factor: float = 1.0
    """Part of each head's values that is rotated, whatever the type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Mixture of experts."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    norm_topk_prob: bool
    layers: frozenset[int]
    """Sparse layers; the others have an ordinary MLP."""
    scoring: Literal["softmax", "sigmoid", "group_limited"] = "softmax"
    """`sigmoid`: the router of DeepSeek V3, whose fields are the next three. `group_limited`: that of DeepSeek V2."""
    num_groups: int = 1
    topk_groups: int = 1
    routed_scaling_factor: float = 1.0
    router_bias: bool = False
    latent_size: int = 0
    """Values that routed experts read and write, if they are fewer than a token has."""
    shared_intermediate_size: int = 0
    """Size of the expert, or of all experts side by side, that every token shares; 0 for none."""
    shared_name: str = "shared_expert"
    """Its name in the checkpoint."""
    shared_gate: bool = False
    """Whether what it gives is scaled by a sigmoid of the token's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention: see layers/latent_attention.py."""

    q_rank: int | None
    """Size of the latent that queries are made of; None if they are made of the token."""
    rank: int
    """Size of the latent that keys and values are made of."""
    nope_dim: int
    """Size of the part of a head's query and key that is not rotated."""
    rope_dim: int
    value_dim: int
    interleaved: bool
    """Whether pairs that are rotated together are neighbours, instead of halves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """What only BERT and its successors have."""

    layer_norm_eps: float
    norm_bias: bool
    type_vocab_size: int
    """Kinds of tokens, each with an embedding: the first and the second text of a pair; 0 for none."""
    first_position: int
    """Row of the position embeddings that belongs to the first token; RoBERTa keeps those before for padding."""
    classifier_bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """What a multimodal model has beside its language model; its images are encoded by transformers' own code."""

    transformers: str
    """config.json."""
    image_token_id: int
    """Placeholder of an embedding in a prompt."""
    deepstack: int = 0
    """Layers, the first ones, behind which an image adds something of its own."""
    merge_size: int = 1
    """Patches of an image's height, and of its width, that make one embedding."""
    mm_tokens_per_image: int = 0
    """Tokens of every image, in a model where they also see those behind them; 0 if they are read like text."""
    rope_axes: tuple[int, ...] = ()
    """What each rotary frequency turns by: 0 for the time of a token, 1 for its height, 2 for its width in an image;
    all are a text token's position. Empty if images have positions like text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a transformer, decoder or encoder. Sizes are those of the whole model, not of one rank."""

    architecture: str
    dtype: str
    """Data type of the stored weights that are not quantized."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_scale: float
    """Factor on q @ k."""
    activation: str
    rms_norm_eps: float
    max_position_embeddings: int
    """Longest sequence that the rotary embedding is made for, context extension included."""
    rope: tuple[RopeConfig, ...]
    """One per layer."""
    window: tuple[int | None, ...]
    """One per layer: with a window w, a token sees itself and the w - 1 tokens before it, and if `bidirectional` also
    the w - 1 after it; None shows it all."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]
    """Tokens that end a generation; empty if the model names none."""
    moe: MoEConfig | None
    recurrent: RecurrentConfig | None = None
    """The layers whose past is a state."""
    latent: LatentConfig | None = None
    """Latent attention; `num_kv_heads` is then 1, and `head_dim` the size of what is cached of a token."""
    block_types: tuple[str, ...] = ()
    """What each layer is, in a family with recurrent layers: see recurrent_config.py."""
    multipliers: Multipliers = field(default_factory=Multipliers)
    attn_logit_softcapping: float | None = None
    """Attention scores lie between minus this and this."""
    final_logit_softcapping: float | None = None
    """Logits lie between minus this and this."""
    qk_norm: bool = False
    """Whether each head's query and key are normed, in families where some models do and some do not."""
    num_nextn_predict_layers: int = 0
    """Layers of the checkpoint, after the others, that predict further tokens; they are not loaded."""
    quantization: Scheme | None = None
    """The formats of the checkpoint's linear layers, if any are quantized."""
    bidirectional: bool = False
    """Tokens also see those after them: a prompt is computed in one step, and no KV is kept."""
    encoder: EncoderConfig | None = None
    head: Head = "lm"
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    vision: VisionConfig | None = None
    """None for a model that reads text only."""
    transformers: str = ""
    """config.json, if transformers' own code computes the model (engine/model/transformers_backend); `rope` is then
    empty, and what is said about biases, norms and experts does not count. Empty for a native family."""
    layer_kv: LayerSpecs = ()
    """What each layer keeps (kv_groups.py), where it does not follow from `window`, `num_kv_heads` and `head_dim`."""
    keeps_all_kv: bool = False
    """Layers with a window keep the KV of all tokens, as the others do."""

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        quantization: str | None = None,
        max_model_len: int | None = None,
        language_model_only: bool = False,
    ) -> ModelConfig:
        """quantization: what weights are rounded to as they are loaded, or how they are stored. max_model_len: the
        longest sequence, by which a model with `longrope` turns short sequences too; None stands for the model's own
        context. language_model_only: leave out what encodes images.

        Raises UnsupportedArchitecture, ModelFolderError that names the field of config.json, or ConfigError.
        """
        cfg = cls.from_fields(read_json(folder, "config.json"), folder, quantization, max_model_len)
        return replace(cfg, vision=None) if language_model_only else cfg

    @classmethod
    def from_fields(
        cls, raw: Fields, folder: Path, quantization: str | None = None, max_model_len: int | None = None
    ) -> ModelConfig:
        """The same with the fields of config.json already read, and possibly changed."""
        whole = raw
        architecture, raw = text_part(raw)
        family = find_family(architecture)
        try:
            dtype = _dtype(raw, folder)
            if family is not None:
                cfg = _parse(architecture, family, family.fields(raw), dtype, max_model_len)
            else:
                cfg = _from_transformers(raw, dtype, max_model_len)
            eos = eos_token_ids(folder) or cfg.eos_token_ids
            pooling = PoolingConfig.from_folder(folder, _default_pooling(cfg, raw))
            cfg = replace(cfg, eos_token_ids=eos, pooling=pooling, vision=_vision(whole, cfg))
        except KeyError as e:
            raise ModelFolderError(str(folder), f"config.json has no {e.args[0]!r}") from e
        except _Unsupported as e:
            raise ModelFolderError(str(folder), f"config.json: {e.field} = {e.value!r} is not supported") from e
        except UnsupportedScheme as e:
            problem = f"config.json: quantization_config.{e.key} = {e.value!r} is not supported: must be {e.limit}"
            raise ModelFolderError(str(folder), problem) from e

        return cfg if quantization is None else cfg.quantized(quantization)

    @property
    def supported_tasks(self) -> SupportedTasks:
        """What requests may ask for. A generative model makes embeddings as well, and if its files name no modules for
        them, scores by its words for yes and no."""
        pooling = self.pooling
        is_reranker = pooling.score_token_ids is not None or not pooling.is_embedding
        names: dict[Head, tuple[Task, ...]] = {
            "score": ("score",),
            "none": ("embed",),
            "lm": ("generate", "embed", "score") if is_reranker else ("generate", "embed"),
        }
        return SupportedTasks(
            names=names[self.head],
            embedding_size=pooling.dense[-1].outputs if pooling.dense else self.hidden_size,
            matryoshka_dimensions=pooling.matryoshka_dimensions,
            score_token_ids=pooling.score_token_ids,
            prompts=pooling.prompts,
            default_prompt_name=pooling.default_prompt_name,
        )

    def quantized(self, method: str) -> ModelConfig:
        """Return the same model with weights that are rounded as they are loaded, or itself if that is how they are
        stored. Raises ConfigError if they are quantized in another way."""
        from engine.model.quantization.online import METHODS
        from engine.model.quantization.scheme import online

        stored = None if self.quantization is None else self.quantization.method
        if stored == method:
            return self
        if stored in (None, "gguf") and method in METHODS:  # weights in a GGUF file are also read as numbers
            return replace(self, quantization=online(method))
        if stored is not None:
            raise ConfigError("quantization", method, f"left out: the model is quantized ({stored})")
        limit = f"left out: the model is not quantized; {', '.join(METHODS)} round it as it is loaded"
        raise ConfigError("quantization", method, limit)

    @property
    def head_format(self) -> Online | None:
        """How the language model's head is rounded as it is loaded."""
        return None if self.quantization is None else self.quantization.head

    def weight_format(self, prefix: str, *names: str) -> WeightFormat | None:
        """The format of linear layers that are merged into one; None if they are not quantized.

        Raises ConfigError if their formats differ.
        """
        if self.quantization is None:
            return None
        try:
            return self.quantization.format_of([f"model.{prefix}.{name}" for name in names])
        except UnsupportedScheme as e:
            raise ConfigError(f"quantization_config.{e.key}", e.value, e.limit) from e

    def kv_heads_per_rank(self, tp_size: int = 1) -> int:
        """KV heads that a rank holds; with more ranks than heads, several ranks hold the same one.

        Raises ConfigError when heads and ranks do not divide.
        """
        if self.num_heads % tp_size:
            raise ConfigError("tensor_parallel", tp_size, f"a divisor of the model's {self.num_heads} heads")
        return KVCacheSpec(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim).heads_per_rank(tp_size)

    def longest_sequence(self, max_model_len: int | None) -> int:
        """Tokens of the longest sequence; None stands for the model's own context, more raises ConfigError."""
        own = min(self.max_position_embeddings, self.pooling.max_seq_length or self.max_position_embeddings)
        longest = own if max_model_len is None else max_model_len
        if longest > self.max_position_embeddings:
            limit = f"at most the model's own context ({self.max_position_embeddings})"
            raise ConfigError("max_model_len", longest, limit)
        return longest

    def kv_bytes_per_token(self, itemsize: int, tp_size: int = 1) -> int:
        """Bytes of one token's KV in all layers, on one rank; `itemsize` bytes per number."""
        return itemsize * sum(group.token_numbers(tp_size) for group in self.kv_groups)

    @property
    def kv_specs(self) -> LayerSpecs:
        """What each layer keeps of a token."""
        if self.bidirectional:
            return (None,) * self.num_layers
        if self.layer_kv:
            return self.layer_kv
        windows = (None,) * self.num_layers if self.keeps_all_kv else self.window[: self.num_layers]
        types, parts = self.block_types or (WITH_KV[0],) * len(windows), 1 if self.latent is not None else 2
        return tuple(
            KVCacheSpec(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, parts=parts, window=window)
            if type in WITH_KV
            else None
            for type, window in zip(types, windows, strict=False)
        )

    @property
    def kv_groups(self) -> tuple[KVCacheGroup, ...]:
        """Layers by what they keep, those that keep all tokens first; one without layers if the model keeps no KV."""
        none = KVCacheGroup(KVCacheSpec(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim), ())
        return group_layers(self.kv_specs) or (none,)

    def kv_place(self, layer: int) -> tuple[int, int]:
        """Return the KV cache group of a layer, and its index in that group's tensor."""
        return place_of(layer, self.kv_specs)


class _Unsupported(Exception):
    """A field of config.json has a value that this engine does not support."""

    def __init__(self, field: str, value: object):
        super().__init__(field, value)
        self.field, self.value = field, value


def _dtype(raw: Fields, folder: Path) -> str:
    """The data type that config.json names, or else that of the weights, if there are any."""
    named = raw.get("dtype") or raw.get("torch_dtype") or "auto"
    return _one_of("dtype", (stored_dtype(folder) or "float32") if named == "auto" else named, tuple(DTYPES))


def _from_transformers(raw: Fields, dtype: str, max_model_len: int | None) -> ModelConfig:
    """The second way, for an architecture that is not in families.py."""
    from engine.model.auto_config import read

    fields = read(raw, max_model_len)
    return ModelConfig(
        **fields,
        dtype=dtype,
        attention_scale=fields["head_dim"] ** -0.5,
        rms_norm_eps=0.0,
        rope=(),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        moe=None,
        quantization=_quantization(raw | {"tie_word_embeddings": fields["tie_word_embeddings"]}),
    )


def _parse(architecture: str, family: Family, raw: Fields, dtype: str, max_model_len: int | None) -> ModelConfig:
    for key in RARE:
        if raw.get(key) and key not in family.keys:
            raise _Unsupported(key, raw[key])
    if raw.get("use_bidirectional_attention") not in (None, False, True):
        raise _Unsupported("use_bidirectional_attention", raw["use_bidirectional_attention"])
    encoder, raw = None, recurrent_config.common_names(raw)
    if family.encoder:
        raw = _common_names(raw)
        encoder = _encoder(raw)
    bidirectional = family.encoder or bool(raw.get("use_bidirectional_attention"))
    if bidirectional and raw.get("sliding_window"):
        raw = {**raw, "sliding_window": raw["sliding_window"] // 2 + 1}  # stated for both sides together
    head = head_of(architecture)
    if head == "score" and (labels := len(raw.get("id2label") or ()) or raw.get("num_labels", 2)) != 1:
        raise _Unsupported("num_labels", labels)
    num_layers, num_heads = raw["num_hidden_layers"], raw["num_attention_heads"]
    latent = _latent(raw)
    head_dim = raw.get("head_dim") or raw["hidden_size"] // num_heads
    if latent is not None:
        head_dim = latent.rank + latent.rope_dim
    windows = _windows(raw, num_layers)
    ropes = _ropes(raw, windows, max_model_len or raw["max_position_embeddings"])
    _check_factors(ropes, head_dim)
    attention_bias = bool(raw.get("attention_bias"))
    return ModelConfig(
        architecture=architecture,
        dtype=dtype,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=1 if latent else raw.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        latent=latent,
        attention_scale=_attention_scale(raw, latent, head_dim),
        activation=_activation(raw, ENCODER_ACTIVATIONS if encoder else family.activations),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        max_position_embeddings=_max_positions(raw["max_position_embeddings"], ropes)
        - (encoder.first_position if encoder else 0),
        rope=ropes,
        window=windows,
        qkv_bias=raw.get("qkv_bias", attention_bias),
        output_bias=raw.get("output_bias", attention_bias),
        mlp_bias=bool(raw.get("mlp_bias")),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
        eos_token_ids=as_token_ids(raw.get("eos_token_id")),
        moe=_moe(raw, num_layers),
        recurrent=recurrent_config.read(raw, num_layers),
        block_types=recurrent_config.block_types(raw, num_layers) if "recurrent" in raw else (),
        multipliers=multipliers.read(raw),
        attn_logit_softcapping=raw.get("attn_logit_softcapping"),
        final_logit_softcapping=raw.get("final_logit_softcapping"),
        qk_norm=bool(raw.get("use_qk_norm")),
        num_nextn_predict_layers=raw.get("num_nextn_predict_layers") or 0,
        quantization=_quantization(raw),
        bidirectional=bidirectional,
        encoder=encoder,
        head="none" if bidirectional and head == "lm" else head,
    )


def _check_factors(ropes: tuple[RopeConfig, ...], head_dim: int) -> None:
    for rope in ropes:
        if rope.type == "longrope" and len(rope.factors) != int(head_dim * rope.partial_rotary_factor) // 2:
            raise _Unsupported("short_factor or long_factor", list(rope.factors))


def _activation(raw: Fields, supported: tuple[str, ...]) -> Any:
    return _one_of("hidden_act", raw.get("hidden_activation") or raw["hidden_act"], supported)


def _latent(raw: Fields) -> LatentConfig | None:
    if not raw.get("kv_lora_rank"):
        return None
    return LatentConfig(
        q_rank=raw["q_lora_rank"],
        rank=raw["kv_lora_rank"],
        nope_dim=raw["qk_nope_head_dim"],
        rope_dim=raw["qk_rope_head_dim"],
        value_dim=raw["v_head_dim"],
        interleaved=raw.get("rope_interleave", True),
    )


def _attention_scale(raw: Fields, latent: LatentConfig | None, head_dim: int) -> float:
    """The factor on scores. YaRN with `mscale_all_dim` raises that of latent attention: DeepSeek V2, arXiv:2405.04434,
    section 3.1.4."""
    if latent is None:
        return raw.get("attention_multiplier") or float(raw.get("query_pre_attn_scalar") or head_dim) ** -0.5
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    weight, factor = rope.get("mscale_all_dim"), rope.get("factor", 1.0)
    raised = 0.1 * weight * math.log(factor) + 1.0 if weight and factor > 1 else 1.0
    return (latent.nope_dim + latent.rope_dim) ** -0.5 * raised**2


def _vision(raw: Fields, cfg: ModelConfig) -> VisionConfig | None:
    """raw: the whole config.json. None if the model's images are not supported, and it serves as a text model."""
    architecture, vision = (raw.get("architectures") or ["none"])[0], raw.get("vision_config")
    if architecture not in VISION or cfg.transformers or not vision:
        return None
    found = VisionConfig(
        transformers=json.dumps(raw, sort_keys=True),
        image_token_id=raw["image_token_id"] if "image_token_id" in raw else raw["image_token_index"],
        deepstack=len(vision.get("deepstack_visual_indexes") or ()),
        mm_tokens_per_image=raw.get("mm_tokens_per_image", 256) if raw.get("model_type") == "gemma3" else 0,
    )
    order = VISION[architecture]
    if order is None:
        return found
    text = {**raw, **(raw.get("text_config") or {})}
    sections = (text.get("rope_parameters") or text.get("rope_scaling") or {})["mrope_section"]
    if sum(sections) != cfg.head_dim // 2:
        raise _Unsupported("mrope_section", sections)
    axes = [axis for axis, size in enumerate(sections) for _ in range(size)]
    if order == "interleaved":
        axes = [0] * len(axes)
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = [axis] * sections[axis]
    return replace(found, merge_size=vision["spatial_merge_size"], rope_axes=tuple(axes))


def _common_names(raw: Fields) -> Fields:
    """ModernBERT's fields under the names that other families have for them. Its layers alternate: one sees all, and
    those up to the next have a window."""
    if "local_attention" not in raw:
        return raw
    full = range(0, raw["num_hidden_layers"], raw["global_attn_every_n_layers"])
    types = ["full_attention" if i in full else "sliding_attention" for i in range(raw["num_hidden_layers"])]
    return {
        "layer_types": types,
        **raw,
        "sliding_window": raw["local_attention"],
        "rope_theta": raw["global_rope_theta"],
        "rope_local_base_freq": raw["local_rope_theta"],
        "layer_norm_eps": raw["norm_eps"],
        "norm_bias": raw.get("norm_bias", False),
        "type_vocab_size": 0,
        "first_position": 0,
    }


def _encoder(raw: Fields) -> EncoderConfig:
    only = {"position_embedding_type": "absolute", "is_decoder": False, "classifier_activation": "gelu"}
    for key, value in only.items():
        if raw.get(key, value) != value:
            raise _Unsupported(key, raw[key])
    return EncoderConfig(
        layer_norm_eps=raw["layer_norm_eps"],
        norm_bias=raw.get("norm_bias", True),
        type_vocab_size=raw["type_vocab_size"],
        first_position=raw["first_position"] if "first_position" in raw else raw["pad_token_id"] + 1,
        classifier_bias=raw.get("classifier_bias", False),
    )


def _default_pooling(cfg: ModelConfig, raw: Fields) -> PoolingType:
    """The pooling of a model that names no modules: sentence-transformers' default for an encoder, vLLM's for a
    decoder, and for a score what its head was trained on."""
    if cfg.encoder and cfg.head == "score":
        return "mean" if raw.get("classifier_pooling") == "mean" else "cls"
    return "mean" if cfg.bidirectional else "last"


def _one_of(field: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if value not in allowed:
        raise _Unsupported(field, value)
    return value


def _quantization(raw: Fields) -> Scheme | None:
    config = raw.get("quantization_config") or raw.get("compression_config")
    if not config:
        return None
    from engine.model.quantization import scheme

    found = scheme.parse(config)
    if not raw.get("tie_word_embeddings") and found.format_of(["lm_head"]) is not None:
        raise UnsupportedScheme("ignore", config.get("ignore"), "a list with lm_head, which is not quantized here")
    return found


def _windows(raw: Fields, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer. Families state it per layer, by a pattern (Gemma 3: every sixth layer is
    global), from some layer on (Qwen), or for all layers (Mistral, Qwen 3 MoE); Llama has none."""
    window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
    if window is None:
        return (None,) * num_layers
    if types := raw.get("layer_types"):
        allowed = ("full_attention", "sliding_attention")
        sliding = [_one_of("layer_types", t, allowed) == "sliding_attention" for t in types]
    elif pattern := raw.get("sliding_window_pattern"):
        sliding = [(i + 1) % pattern != 0 for i in range(num_layers)]
    else:
        sliding = [i >= raw.get("max_window_layers", 0) for i in range(num_layers)]
    return tuple(window if s else None for s in sliding)


def _ropes(raw: Fields, windows: tuple[int | None, ...], longest: int) -> tuple[RopeConfig, ...]:
    """The rotary embedding of each layer. transformers 5 writes `rope_parameters`, one set or one per layer type;
    before, it was `rope_theta` with `rope_scaling`, and `rope_local_base_freq` for Gemma 3's windowed layers."""
    if raw.get("position_embedding_type", "rope") in (None, "nope"):
        return (RopeConfig(type="none"),) * len(windows)
    parameters = raw.get("rope_parameters") or {}
    theta, local_theta = raw.get("rope_theta", 10_000.0), raw.get("rope_local_base_freq", 10_000.0)
    if "full_attention" in parameters or "sliding_attention" in parameters:
        full = _rope(parameters.get("full_attention") or {}, theta, raw, longest)
        local = _rope(parameters.get("sliding_attention") or {}, local_theta, raw, longest)
    else:
        full = _rope(raw.get("rope_scaling") or parameters, theta, raw, longest)
        local = RopeConfig(theta=raw["rope_local_base_freq"]) if "rope_local_base_freq" in raw else full
    return tuple(full if window is None else local for window in windows)


def _rope(parameters: Fields, theta: float, raw: Fields, longest: int) -> RopeConfig:
    """One set of parameters. `theta` and the rest of config.json apply where it has none of its own."""
    partial = parameters.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if partial != 1.0 and "partial_rotary_factor" not in raw:  # the family's code rotates whole heads
        raise _Unsupported("partial_rotary_factor", partial)
    return replace(_scaled_rope(parameters, theta, raw, longest), partial_rotary_factor=partial)


def _scaled_rope(parameters: Fields, theta: float, raw: Fields, longest: int) -> RopeConfig:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = _one_of("rope_type", "longrope" if kind == "su" else kind, ROPE_TYPES)
    theta = parameters.get("rope_theta", theta)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(type="linear", theta=theta, factor=parameters["factor"])
    context = raw["max_position_embeddings"]
    stated = raw.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    original = stated or context
    if kind == "llama3":
        own = {key: parameters[key] for key in ("factor", "low_freq_factor", "high_freq_factor")}
        return RopeConfig(type="llama3", theta=theta, original_max_position_embeddings=original, **own)
    factor = parameters.get("factor") or context / original
    if kind == "longrope":
        return RopeConfig(
            type="longrope",
            theta=theta,
            original_max_position_embeddings=original,
            attention_factor=_longrope_attention_factor(parameters, factor, original),
            factors=tuple(parameters["long_factor" if longest > original else "short_factor"]),
        )
    return RopeConfig(
        type="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        truncate=parameters.get("truncate", True),
        attention_factor=_yarn_attention_factor(parameters, factor),
    )


def _yarn_attention_factor(parameters: Fields, factor: float) -> float:
    """The factor of YaRN, arXiv:2309.00071, section 3.4; DeepSeek's variant divides it by a second such term."""
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    top, bottom = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return mscale(top) / mscale(bottom) if top and bottom else mscale(1.0)


def _longrope_attention_factor(parameters: Fields, factor: float, original: int) -> float:
    """The factor of LongRoPE, arXiv:2402.13753, as in Phi-3, arXiv:2404.14219."""
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _max_positions(stated: int, ropes: tuple[RopeConfig, ...]) -> int:
    """The context that YaRN reaches, if it exceeds the stated one: Qwen states the original context."""
    reached = [int(r.factor * r.original_max_position_embeddings) for r in ropes if r.type == "yarn"]
    return max([stated, *reached])


def _moe(raw: Fields, num_layers: int) -> MoEConfig | None:
    num_experts = raw.get("num_experts") or raw.get("num_local_experts") or raw.get("n_routed_experts")
    if not num_experts:
        return None
    step, dense = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    first = raw.get("first_k_dense_replace", 0)
    size = raw["moe_intermediate_size"] if "moe_intermediate_size" in raw else raw["intermediate_size"]
    gated = "shared_expert_intermediate_size" in raw
    shared = raw.get("shared_expert_intermediate_size") or size * (raw.get("n_shared_experts") or 0)
    _one_of("swiglu_limit", raw.get("swiglu_limit", SWIGLU_LIMIT), (SWIGLU_LIMIT,))
    _one_of("swiglu_alpha", raw.get("swiglu_alpha", SWIGLU_ALPHA), (SWIGLU_ALPHA,))
    groups = raw.get("n_group") or 1
    if raw.get("topk_method") == "greedy":
        groups = 1
    if groups != 1 and (num_experts % groups or num_experts == groups):  # groups are chosen by their two best experts
        raise _Unsupported("n_group", groups)
    return MoEConfig(
        num_experts=num_experts,
        experts_per_token=raw["num_experts_per_tok"],
        intermediate_size=size,
        norm_topk_prob=raw.get("norm_topk_prob", False),
        layers=frozenset(i for i in range(first, num_layers) if (i + 1) % step == 0 and i not in dense),
        scoring=raw.get("scoring", "softmax"),
        num_groups=groups,
        topk_groups=raw.get("topk_group") or 1,
        routed_scaling_factor=raw.get("routed_scaling_factor", 1.0),
        router_bias=raw.get("router_bias", False),
        shared_intermediate_size=shared,
        latent_size=raw.get("moe_latent_size") or 0,
        shared_name=raw.get("shared_name") or ("shared_expert" if gated else "shared_experts"),
        shared_gate=raw.get("shared_gate", gated),
    )
