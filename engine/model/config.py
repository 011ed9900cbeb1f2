"""Reads the shape of a model from the config.json of its folder.

A field that would change the output and is not supported is an error at start, never ignored. Imports no torch, so
that reading a configuration stays fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError
from engine.model.checkpoint.fields import Fields, Unsupported, one_of, reading
from engine.model.checkpoint.folder import as_token_ids, eos_token_ids, read_json, stored_dtype
from engine.model.config_parts.encoder import EncoderConfig, encoder_names
from engine.model.config_parts.gemma import GemmaConfig, gemma_names, gemma_specs
from engine.model.config_parts.latent import LatentConfig, attention_scale
from engine.model.config_parts.moe import MoEConfig
from engine.model.config_parts.multipliers import Multipliers
from engine.model.config_parts.pooling import PoolingConfig, PoolingType
from engine.model.config_parts.recurrent import RecurrentConfig, block_types, recurrent_names
from engine.model.config_parts.rope import RopeConfig, check_factors, max_positions, read_ropes
from engine.model.config_parts.stage import ALL_LAYERS, Stage
from engine.model.config_parts.unread import check_unread
from engine.model.config_parts.vision import VisionConfig
from engine.model.families import Family, Head, find_family, head_of, text_part
from engine.model.kv_groups import KVCacheGroup, KVCacheSpec, LayerSpecs, all_kept, group_layers, place_of
from engine.model.quantization import scheme
from engine.model.quantization.method import METHODS
from engine.model.quantization.unsupported import UnsupportedScheme
from engine.wire.pooling_params import SupportedTasks, Task

if TYPE_CHECKING:
    from engine.model.quantization.format import WeightFormat
    from engine.model.quantization.online import Online

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number
ENCODER_ACTIVATIONS = ("gelu",)
WITH_KV = ("attention", "hybrid")  # the `block_types` that keep KV
# Fields of config.json that change the output if they are set, and that only few families support.
RARE = ("attn_logit_softcapping", "final_logit_softcapping")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a transformer, decoder or encoder. Sizes are those of the whole model, not of one rank."""

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
    """Longest sequence that the rotary embedding supports, context extension included."""
    rope: tuple[RopeConfig, ...]
    """One per layer."""
    window: tuple[int | None, ...]
    """One per layer: with a window w, a token sees itself and the w - 1 tokens before it, and if `bidirectional` also
    the w - 1 tokens after it. None means no window."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]
    """Tokens that end a generation; empty if the model names none."""
    moe: MoEConfig | None
    recurrent: RecurrentConfig | None = None
    """The layers that keep a recurrent state in place of KV."""
    latent: LatentConfig | None = None
    """Latent attention; `num_kv_heads` is then 1, and `head_dim` the size of the vector cached for a token."""
    block_types: tuple[str, ...] = ()
    """The type of each layer in a family with recurrent layers (`block_types` in config_parts/recurrent.py)."""
    multipliers: Multipliers = field(default_factory=Multipliers)
    gemma: GemmaConfig | None = None
    """Options that Gemma 3n and Gemma 4 have and Gemma 3 lacks."""
    attn_logit_softcapping: float | None = None
    """Limit on the absolute value of attention scores, by tanh."""
    final_logit_softcapping: float | None = None
    """Limit on the absolute value of logits, by tanh."""
    qk_norm: bool = False
    """Whether each head's query and key are normed, in families where some models do and some do not."""
    num_nextn_predict_layers: int = 0
    """Number of the checkpoint's last layers, which predict further tokens and are not loaded."""
    quantization: scheme.Scheme | None = None
    """The formats of the checkpoint's linear layers; None if none is quantized."""
    bidirectional: bool = False
    """Whether tokens also see later ones. A prompt is then computed in one step, and no KV is kept."""
    encoder: EncoderConfig | None = None
    head: Head = "lm"
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    vision: VisionConfig | None = None
    """None for a model that reads text only."""
    transformers: str = ""
    """config.json, if transformers' own code computes the model (engine/model/transformers_backend); empty for a native
    family. If it is set, `rope` is empty, and the fields for biases, norms and experts have no meaning."""
    layer_kv: LayerSpecs = ()
    """What each layer keeps (kv_groups.py). Empty if it follows from `window`, `num_kv_heads` and `head_dim`."""
    keeps_all_kv: bool = False
    """Whether layers with a window keep the KV of all tokens."""
    stage: Stage = ALL_LAYERS
    """The layers that this pipeline stage has (stage.py)."""

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        quantization: str | None = None,
        max_model_len: int | None = None,
        language_model_only: bool = False,
    ) -> ModelConfig:
        """Read the configuration of a model.

        quantization: the method that rounds weights as they are loaded, or the one with which they are already stored.
        max_model_len: the longest sequence, on which the frequencies of `longrope` depend; None for the model's
        context. language_model_only: leave out the vision encoder.

        Raises UnsupportedArchitecture, ModelFolderError that names the field of config.json, or ConfigError.
        """
        cfg = cls.from_fields(read_json(folder, "config.json"), folder, quantization, max_model_len)
        return replace(cfg, vision=None) if language_model_only else cfg

    @classmethod
    def from_fields(
        cls, raw: dict[str, Any], folder: Path, quantization: str | None = None, max_model_len: int | None = None
    ) -> ModelConfig:
        """Read the configuration like `from_folder`, but from given fields of config.json, which may differ from the
        file."""
        with reading(folder, "config.json"):
            try:
                cfg = _read(Fields(raw), folder, max_model_len)
            except UnsupportedScheme as e:
                raise Unsupported(f"quantization_config.{e.key}", e.value, e.limit) from e
        return cfg if quantization is None else cfg.quantized(quantization)

    @property
    def supported_tasks(self) -> SupportedTasks:
        """The tasks that requests may ask for. A generative model can also make embeddings. It can also give scores,
        from the logits of its tokens for yes and no, unless its files name modules that only embed."""
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
        """Return the model with weights rounded by `method` as they are loaded; the model itself if its weights are
        stored that way. Raises ConfigError for an unknown method, or if the weights are stored in another quantized
        format."""
        stored = None if self.quantization is None else self.quantization.method
        if stored == method:
            return self
        if stored in (None, "gguf") and method in METHODS:  # weights of a GGUF file can be dequantized first
            return replace(self, quantization=scheme.online(method))
        if stored is not None:
            raise ConfigError("quantization", method, f"left out: the model is quantized ({stored})")
        limit = f"left out: the model is not quantized; {', '.join(METHODS)} round it as it is loaded"
        raise ConfigError("quantization", method, limit)

    @property
    def head_format(self) -> Online | None:
        """The format to which the language model's head is rounded as it is loaded; None if the head is not rounded."""
        return None if self.quantization is None else self.quantization.head_format()

    def weight_format(self, prefix: str, *names: str) -> WeightFormat | None:
        """Return the format of linear layers that are merged into one; None if they are not quantized.

        prefix: common beginning of the layers' names in the checkpoint. names: the rest of each name.
        Raises ConfigError if their formats differ.
        """
        if self.quantization is None:
            return None
        try:
            return self.quantization.format_of([f"model.{prefix}.{name}" for name in names])
        except UnsupportedScheme as e:
            raise ConfigError(f"quantization_config.{e.key}", e.value, e.limit) from e

    def kv_heads_per_rank(self, tp_size: int = 1) -> int:
        """Return the number of KV heads on a rank. With more ranks than heads, several ranks hold the same head.

        Raises ConfigError if heads cannot be split over the ranks.
        """
        if self.num_heads % tp_size:
            raise ConfigError("tensor_parallel_size", tp_size, f"a divisor of the model's {self.num_heads} heads")
        return KVCacheSpec(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim).heads_per_rank(tp_size)

    def longest_sequence(self, max_model_len: int | None) -> int:
        """Return the length in tokens of the longest sequence. max_model_len: the configured limit; None for the
        model's context. Raises ConfigError for a limit above the model's context."""
        own = min(self.max_position_embeddings, self.pooling.max_seq_length or self.max_position_embeddings)
        longest = own if max_model_len is None else max_model_len
        if longest > self.max_position_embeddings:
            limit = f"at most the model's own context ({self.max_position_embeddings})"
            raise ConfigError("max_model_len", longest, limit)
        return longest

    def kv_bytes_per_token(self, itemsize: int, tp_size: int = 1) -> int:
        """Return the bytes of one token's KV in all layers on one rank. itemsize: bytes per number."""
        return itemsize * sum(group.token_numbers(tp_size) for group in self.kv_groups)

    @property
    def kv_specs(self) -> LayerSpecs:
        """The KV that each layer keeps for a token."""
        if self.bidirectional:
            return (None,) * self.num_layers
        if self.layer_kv:
            return all_kept(self.layer_kv) if self.keeps_all_kv else self.layer_kv
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
        """The KV cache groups, those without a window first; one group without layers if the model keeps no KV."""
        none = KVCacheGroup(KVCacheSpec(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim), ())
        return tuple(group.part(self.stage.layers) for group in group_layers(self.kv_specs) or (none,))

    def kv_place(self, layer: int) -> tuple[int, int]:
        """Return the KV cache group of a layer, and its index in that group's tensor."""
        return place_of(layer, self.kv_specs, self.kv_groups)


def _read(whole: Fields, folder: Path, max_model_len: int | None) -> ModelConfig:
    architecture, raw = text_part(whole)
    family = find_family(architecture)
    dtype = _dtype(raw, folder)
    if family is None:
        cfg = _from_transformers(raw, dtype, max_model_len)
    else:
        cfg = _parse(architecture, family, family.fields(raw), dtype, max_model_len)
        _check_sizes(cfg)
    eos = eos_token_ids(folder) or cfg.eos_token_ids
    pooling = PoolingConfig.from_folder(folder, _default_pooling(cfg, raw))
    vision = None
    if family is not None:
        vision = VisionConfig.read(whole, int(cfg.head_dim * cfg.rope[0].partial_rotary_factor))
        check_unread(whole, raw, cfg, folder)
    return replace(cfg, eos_token_ids=eos, pooling=pooling, vision=vision)


def _check_sizes(cfg: ModelConfig) -> None:
    """Raise Unsupported for sizes that no model has together."""
    if cfg.head_dim < 1:
        raise Unsupported("num_attention_heads", cfg.num_heads, f"at most hidden_size ({cfg.hidden_size})")
    if cfg.num_heads % cfg.num_kv_heads:
        raise Unsupported("num_key_value_heads", cfg.num_kv_heads, f"a divisor of the {cfg.num_heads} attention heads")
    for name, types in (("layer_types", cfg.window), ("layer_types", cfg.block_types)):
        if types and len(types) < cfg.num_layers:
            raise Unsupported(name, list(types), f"a list of {cfg.num_layers}, one for each layer")


def _dtype(raw: Fields, folder: Path) -> str:
    """Return the dtype that config.json names, else the dtype of the stored weights, else float32."""
    named = raw.get("dtype") or raw.get("torch_dtype") or "auto"
    return one_of("dtype", (stored_dtype(folder) or "float32") if named == "auto" else named, tuple(DTYPES))


def _from_transformers(raw: Fields, dtype: str, max_model_len: int | None) -> ModelConfig:
    """Return the configuration of an architecture that is not in families.py and that transformers computes."""
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
    head, raw = head_of(architecture), _known_names(family, raw)
    encoder = EncoderConfig.read(raw) if family.encoder else None
    bidirectional = family.encoder or bool(raw.get("use_bidirectional_attention"))
    if bidirectional and raw.get("sliding_window"):
        raw = raw | {"sliding_window": raw["sliding_window"] // 2 + 1}  # config.json counts both sides
    if head == "score" and (labels := len(raw.get("id2label") or ()) or raw.get("num_labels", 2)) != 1:
        raise Unsupported("num_labels", labels)
    num_layers, num_heads = raw["num_hidden_layers"], raw["num_attention_heads"]
    latent = LatentConfig.read(raw)
    head_dim = raw.get("head_dim") or raw["hidden_size"] // num_heads
    if latent is not None:
        head_dim = latent.cached_dim
    windows = _windows(raw, num_layers)
    ropes = read_ropes(raw, windows, max_model_len or raw["max_position_embeddings"])
    check_factors(ropes, head_dim)
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
        attention_scale=attention_scale(raw, latent, head_dim),
        activation=_activation(raw, ENCODER_ACTIVATIONS if encoder else family.activations),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        max_position_embeddings=max_positions(raw["max_position_embeddings"], ropes)
        - (encoder.first_position if encoder else 0),
        rope=ropes,
        window=windows,
        qkv_bias=raw.get("qkv_bias", attention_bias),
        output_bias=raw.get("output_bias", attention_bias),
        mlp_bias=bool(raw.get("mlp_bias")),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
        eos_token_ids=as_token_ids(raw.get("eos_token_id")),
        moe=MoEConfig.read(raw, num_layers),
        recurrent=RecurrentConfig.read(raw, num_layers),
        block_types=block_types(raw, num_layers) if "recurrent" in raw else (),
        multipliers=Multipliers.read(raw),
        gemma=GemmaConfig.read(raw),
        layer_kv=gemma_specs(raw, windows),
        attn_logit_softcapping=raw.get("attn_logit_softcapping"),
        final_logit_softcapping=raw.get("final_logit_softcapping"),
        qk_norm=bool(raw.get("use_qk_norm")),
        num_nextn_predict_layers=raw.get("num_nextn_predict_layers") or raw.get("mtp_num_hidden_layers") or 0,
        quantization=_quantization(raw),
        bidirectional=bidirectional,
        encoder=encoder,
        head="none" if bidirectional and head == "lm" else head,
    )


def _known_names(family: Family, raw: Fields) -> Fields:
    """Return the fields under the names that `_parse` reads. Raises Unsupported."""
    raw = gemma_names(raw)
    for key in RARE:
        if raw.get(key) and key not in family.keys:
            raise Unsupported(key, raw[key])
    if raw.get("use_bidirectional_attention") not in (None, False, True):
        raise Unsupported("use_bidirectional_attention", raw["use_bidirectional_attention"])
    raw = recurrent_names(raw)
    return encoder_names(raw) if family.encoder else raw


def _activation(raw: Fields, supported: tuple[str, ...]) -> Any:
    if "recurrent" in raw and "silu" in supported:
        supported = ("silu",)  # transformers applies it to the convolutions of recurrent layers too
    return one_of("hidden_act", raw.get("hidden_activation") or raw["hidden_act"], supported)


def _default_pooling(cfg: ModelConfig, raw: Fields) -> PoolingType:
    """Return the pooling of a model whose folder names no modules: sentence-transformers' default for an encoder,
    vLLM's for a decoder; for a score head, the pooling that it was trained with."""
    if cfg.encoder and cfg.head == "score":
        return "mean" if raw.get("classifier_pooling") == "mean" else "cls"
    return "mean" if cfg.bidirectional else "last"


def _quantization(raw: Fields) -> scheme.Scheme | None:
    config = raw.get("quantization_config") or raw.get("compression_config")
    if not config:
        return None
    found = scheme.parse(config)
    if not raw.get("tie_word_embeddings") and found.quantizes("lm_head"):
        raise UnsupportedScheme(
            "ignore",
            config.get("ignore"),
            "a list that contains lm_head, because the head is not loaded in quantized form",
        )
    return found


def _windows(raw: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer. Families state it per layer, by a pattern (Gemma 3: every sixth layer is
    global), from some layer on (Qwen), or for all layers (Mistral, Qwen 3 MoE); Llama has none."""
    window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
    if window is None:
        return (None,) * num_layers
    if types := raw.get("layer_types"):
        allowed = ("full_attention", "sliding_attention")
        sliding = [one_of("layer_types", t, allowed) == "sliding_attention" for t in types]
    elif pattern := raw.get("sliding_window_pattern"):
        sliding = [(i + 1) % pattern != 0 for i in range(num_layers)]
    else:
        sliding = [i >= raw.get("max_window_layers", 0) for i in range(num_layers)]
    return tuple(window if s else None for s in sliding)
