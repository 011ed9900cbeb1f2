"""Reads the shape of a model from the config.json of its folder.

A field that would change the output and is not supported is an error at start, never ignored. Imports no torch, so
that reading a configuration stays fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.model.checkpoint.fields import Fields, one_of, reading
from engine.model.checkpoint.folder import eos_token_ids, read_json
from engine.model.config_parts.rope import RopeConfig
from engine.model.families.family import Head, find_family
from engine.model.kv_groups import KVCacheGroup, KVCacheSpec, LayerSpecs, all_kept, group_layers, place_of

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number
WITH_KV = ("attention", "hybrid")  # the `block_types` that keep KV
FEATURES = ".config_features"
"""The module whose `read_features` reads what a model has whatever its family."""
STAGE = ".config_parts.stage"
STORED_DTYPE = ".checkpoint.stored_dtype"


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
    block_types: tuple[str, ...] = ()
    """The type of each layer in a family with layers of several types; WITH_KV are those that keep KV."""
    attn_logit_softcapping: float | None = None
    """Limit on the absolute value of attention scores, by tanh."""
    final_logit_softcapping: float | None = None
    """Limit on the absolute value of logits, by tanh."""
    qk_norm: bool = False
    """Whether each head's query and key are normed, in families where some models do and some do not."""
    num_nextn_predict_layers: int = 0
    """Number of the checkpoint's last layers, which predict further tokens and are not loaded."""
    bidirectional: bool = False
    """Whether tokens also see later ones. A prompt is then computed in one step, and no KV is kept."""
    head: Head = "lm"
    supported_tasks: Any = None
    """SupportedTasks (wire/parts/pooling.py): the tasks that requests may ask for, which every model's folder gives."""
    longest_span: int = 0
    """Most tokens of a prompt that one step has to compute together, since they see each other; 0 if all see only
    earlier ones."""
    max_seq_length: int | None = None
    """Longest text, if it is shorter than the model's own context."""
    transformers: str = ""
    """config.json, if transformers' own code computes the model (engine/model/transformers_backend); empty for a native
    family. If it is set, `rope` is empty, and the fields for biases, norms and experts have no meaning."""
    layer_kv: LayerSpecs = ()
    """What each layer keeps (kv_groups.py). Empty if it follows from `window`, `num_kv_heads` and `head_dim`."""
    keeps_all_kv: bool = False
    """Whether layers with a window keep the KV of all tokens."""
    mixins: tuple[str, ...] = ()
    """Classes that are put before the family's, as `file.Class` in models/."""
    # What only some families or models have, each read by the file in config_parts/ that defines its class
    stage: Any = field(default_factory=lambda: import_module(STAGE, __package__).ALL_LAYERS)
    """A Stage: the layers that this engine has."""
    moe: Any = None
    """A MoEConfig: the experts."""
    recurrent: Any = None
    """A RecurrentConfig: the layers that keep a recurrent state in place of KV."""
    latent: Any = None
    """A LatentConfig; `num_kv_heads` is then 1, and `head_dim` the size of the vector cached for a token."""
    multipliers: Any = None
    """Multipliers: factors on parts of the model, which a family that has them always gives."""
    gemma: Any = None
    """A GemmaConfig: options that Gemma 3n and Gemma 4 have and Gemma 3 lacks."""
    values: Any = None
    """A ValueConfig, if values are smaller than keys."""
    encoder: Any = None
    """An EncoderConfig."""
    pooling: Any = None
    """A PoolingConfig, which every model's folder gives."""
    vision: Any = None
    """A VisionConfig; None for a model that reads text only."""
    quantization: Any = None
    """A Scheme (quantization/scheme.py): the formats of the checkpoint's linear layers; None if none is quantized."""

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
        if language_model_only:
            cfg = import_module(FEATURES, __package__).text_only(cfg)
        return cfg

    @classmethod
    def from_fields(
        cls, raw: dict[str, Any], folder: Path, quantization: str | None = None, max_model_len: int | None = None
    ) -> ModelConfig:
        """Read the configuration like `from_folder`, but from given fields of config.json, which may differ from the
        file."""
        features = import_module(FEATURES, __package__)
        with reading(folder, "config.json"):
            cfg: ModelConfig = features.read_features(*_read(Fields(raw), folder, max_model_len), folder)
        return cfg if quantization is None else features.quantized(cfg, quantization)

    @property
    def head_format(self) -> Any:
        """The format to which the language model's head is rounded as it is loaded; None if the head is not rounded."""
        return None if self.quantization is None else self.quantization.head_format()

    def weight_format(self, prefix: str, *names: str) -> Any:
        """Return the format of linear layers that are merged into one; None if they are not quantized.

        prefix: common beginning of the layers' names in the checkpoint. names: the rest of each name.
        Raises ConfigError if their formats differ.
        """
        if self.quantization is None:
            return None
        return self.quantization.layer_format([f"model.{prefix}.{name}" for name in names])

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
        own = min(self.max_position_embeddings, self.max_seq_length or self.max_position_embeddings)
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


def _read(whole: Fields, folder: Path, max_model_len: int | None) -> tuple[ModelConfig, Fields, Fields]:
    """Return what the family reads, the contents of config.json, and the fields of its text part."""
    named = (whole.get("architectures") or ["none"])[0]
    architecture, raw = find_family(named).text_part(named, whole)
    family, dtype = find_family(architecture), _dtype(raw, folder)
    cfg = ModelConfig(**family.read(architecture, raw, max_model_len), dtype=dtype)
    return replace(cfg, eos_token_ids=eos_token_ids(folder) or cfg.eos_token_ids), whole, raw


def _dtype(raw: Fields, folder: Path) -> str:
    """Return the dtype that config.json names, else the dtype of the stored weights, else float32."""
    named = raw.get("dtype") or raw.get("torch_dtype") or "auto"
    if named == "auto":
        named = import_module(STORED_DTYPE, __package__).stored_dtype(folder) or "float32"
    return one_of("dtype", named, tuple(DTYPES))
