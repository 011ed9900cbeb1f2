"""Reads what a model has whatever its family: quantized weights, pooling, and a vision encoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.errors import ConfigError
from engine.model.checkpoint.fields import Fields, Unsupported
from engine.model.config import ModelConfig
from engine.model.config_parts.pooling import PoolingConfig, PoolingType
from engine.model.config_parts.vision import VisionConfig
from engine.model.families.family import Head
from engine.model.families.unread import check_unread
from engine.model.quantization import scheme
from engine.model.quantization.method import METHODS
from engine.model.quantization.unsupported import UnsupportedScheme
from engine.wire.parts.pooling import SupportedTasks, Task

CLASSIFIERS: tuple[Head, ...] = ("score", "token_score")


def read_features(cfg: ModelConfig, whole: Fields, raw: Fields, folder: Path) -> ModelConfig:
    """Return the configuration with these features. Raises Unsupported or ModelFolderError.

    cfg: what the family has read. whole: the contents of config.json. raw: the fields of the text part.
    """
    pooling = PoolingConfig.from_folder(folder, default_pooling(cfg, raw), cfg.head in CLASSIFIERS)
    cfg = replace(
        cfg,
        quantization=read_quantization(cfg, raw),
        pooling=pooling,
        supported_tasks=supported_tasks(cfg, pooling),
        max_seq_length=pooling.max_seq_length,
    )
    if cfg.transformers:
        return cfg
    if vision := VisionConfig.read(whole, int(cfg.head_dim * cfg.rope[0].partial_rotary_factor)):
        cfg = replace(
            cfg, vision=vision, longest_span=vision.mm_tokens_per_image, mixins=("images.image_input.TakesImages",)
        )
    check_unread(whole, raw, cfg, folder)
    return cfg


def text_only(cfg: ModelConfig) -> ModelConfig:
    """Return the model without its vision encoder."""
    return replace(cfg, vision=None, longest_span=0, mixins=())


def read_quantization(cfg: ModelConfig, raw: Fields) -> scheme.Scheme | None:
    """Return the formats in which the checkpoint stores its weights; None if none is quantized."""
    config = raw.get("quantization_config") or raw.get("compression_config")
    if not config:
        return None
    try:
        found = scheme.parse(config)
        if not cfg.tie_word_embeddings and found.quantizes("lm_head"):
            limit = "a list that contains lm_head, because the head is not loaded in quantized form"
            raise UnsupportedScheme("ignore", config.get("ignore"), limit)
    except UnsupportedScheme as e:
        raise Unsupported(f"quantization_config.{e.key}", e.value, e.limit) from e
    return found


def quantized(cfg: ModelConfig, method: str) -> ModelConfig:
    """Return the model with weights rounded by `method` as they are loaded; the model itself if its weights are stored
    that way. Raises ConfigError for an unknown method, or if the weights are stored in another quantized format."""
    stored = None if cfg.quantization is None else cfg.quantization.method
    if stored == method:
        return cfg
    if stored in (None, "gguf") and method in METHODS:  # weights of a GGUF file can be dequantized first
        return replace(cfg, quantization=scheme.online(method))
    if stored is not None:
        raise ConfigError("quantization", method, f"left out: the model is quantized ({stored})")
    limit = f"left out: the model is not quantized; {', '.join(METHODS)} round it as it is loaded"
    raise ConfigError("quantization", method, limit)


def supported_tasks(cfg: ModelConfig, pooling: PoolingConfig) -> SupportedTasks:
    """Return the tasks that requests may ask for, the main one first. A generative model can also make embeddings. It
    can also give scores, from the logits of its tokens for yes and no, unless its files name modules that only embed.
    The score head of a decoder can be applied to each token; that of an encoder is trained for a whole text."""
    projected = 0 if cfg.gemma is None else cfg.gemma.embedding_size
    is_reranker = pooling.score_token_ids is not None or not pooling.is_embedding
    names: dict[Head, tuple[Task, ...]] = {
        "score": (
            *(("score",) if len(pooling.labels) == 1 else ()),
            "classify",
            *(() if cfg.encoder else ("token_classify",)),
        ),
        "token_score": ("token_classify",),
        "none": ("embed", "token_embed"),
        "lm": ("generate", "embed", "token_embed", *(("score",) if is_reranker else ())),
    }
    return SupportedTasks(
        names=names[cfg.head],
        embedding_size=pooling.dense[-1].outputs if pooling.dense else projected or cfg.hidden_size,
        matryoshka_dimensions=pooling.matryoshka_dimensions,
        score_token_ids=pooling.score_token_ids,
        prompts=pooling.prompts,
        default_prompt_name=pooling.default_prompt_name,
        labels=pooling.labels,
    )


def default_pooling(cfg: ModelConfig, raw: Fields) -> PoolingType:
    """Return the pooling of a model whose folder names no modules: sentence-transformers' default for an encoder,
    vLLM's for a decoder; for a score head, the pooling that it was trained with."""
    if cfg.encoder and cfg.head == "score":
        return "mean" if raw.get("classifier_pooling") == "mean" else "cls"
    return "mean" if cfg.bidirectional else "last"
