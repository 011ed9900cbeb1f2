"""Facts about a model for the API, from its folder and configuration. Loads no weights and no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from cluster.config.ingress_section import IngressSection
from cluster.config.model_section import ModelSection
from cluster.fingerprint import fingerprint
from deployments.frontend.admission import AdmissionLimits
from deployments.openai.served.model_source import ModelSource
from deployments.openai.served.served_model import ModelInfo
from deployments.parts.table import configured
from engine.errors import ConfigError, Described, InvalidParameter
from engine.model.checkpoint.identity import identity_of
from engine.model.checkpoint.overlay import engine_folder
from engine.model.checkpoint.resolve import has_image_processor, resolve, resolve_tokenizer
from engine.model.checkpoint.sampling_defaults import default_sampling
from engine.model.config import ModelConfig
from engine.model.config_features import text_only
from engine.model.expert_parallel import check_experts
from engine.model.stage import check_stages
from engine.text.chat_tokenizer import ChatTokenizer
from engine.wire.sampling_params import SamplingParams


def model_info(model: ModelSection, ingress: IngressSection) -> ModelInfo:
    """Return the facts about a model. Raises StartupError if it could not be loaded."""
    engine = model.engine_config()
    folder, tokenizer = engine_folder(engine), engine.tokenizer
    text_folder = resolve(model.model) if tokenizer is None else resolve_tokenizer(tokenizer)
    config = ModelConfig.from_folder(folder, engine.quantization, language_model_only=engine.language_model_only)
    _check_pools(model, config)
    ChatTokenizer.from_folder(folder, decodes="generate" in config.supported_tasks)
    identity = identity_of(folder)
    template, sampling = _chat_template(model.chat_template), _default_sampling(model, folder)
    limit = _max_new_tokens(model, sampling)
    max_model_len = config.longest_sequence(engine.max_model_len)
    numerics = fingerprint(
        identity,
        text_folder,
        [model.engine_config(role) for role in model.pools],
        [model.on_gpu(role) for role in model.pools],
        max_model_len,
        template,
        model.default_chat_template_kwargs,
        sampling if limit is None else {**sampling, "max_new_tokens": limit},
        model.tool_call_parser,
        model.reasoning_parser,
    )
    shares_prefixes = not config.bidirectional and config.pooling.type == "last"  # a mean needs every token
    return ModelInfo(
        name=model.name,
        root=model.model,
        folder=str(text_folder),
        identity=identity,
        image_folder=str(folder) if config.vision is not None and has_image_processor(folder) else None,
        fingerprint=numerics,
        max_model_len=max_model_len,
        vocab_size=config.vocab_size,
        default_sampling=sampling,
        max_new_tokens=limit,
        aliases=tuple(model.aliases),
        chat_template=template,
        chat_template_kwargs=model.default_chat_template_kwargs,
        request_timeout_s=ingress.request_timeout_s,
        admission=AdmissionLimits(
            max_num_seqs=engine.max_num_seqs,
            num_engines=max(1, model.decode.bounds[0] * engine.data_parallel_size),
            num_ingresses=ingress.num_replicas,
            max_waiting=ingress.max_waiting,
            max_waiting_tokens=ingress.max_waiting_tokens,
        ),
        block_size=engine.shared_block_size if shares_prefixes else None,
        supported_tasks=config.supported_tasks,
        may_sleep=model.bounds("decode")[0] == 0,
        max_replays=ingress.max_replays,
        sdc_check_every=model.sdc_check_every,
        same_bits=model.same_bits,
        drafts=engine.speculative_config is not None,
        has_priorities=engine.scheduling_policy == "priority",
        tool_call_parser=model.tool_call_parser,
        reasoning_parser=model.reasoning_parser,
        closed_objects=engine.structured_outputs.disable_additional_properties,
        of=configured(ModelSource(model.name, model.model_dump(), engine)),
        prices=model.price_list(),
    )


def _check_pools(model: ModelSection, config: ModelConfig) -> None:
    """Raise StartupError for a pool that the model cannot use, or whose engines could not hold it."""
    if model.prefill is not None and "generate" not in config.supported_tasks:
        tasks = " or ".join(config.supported_tasks.names)
        limit = f"left out: {model.model} can only {tasks}, so a prefill pool has no use"
        raise ConfigError(f"prefill of model {model.name!r}", Described("a pool"), limit)
    if model.encode is not None and config.vision is None:
        limit = f"left out: {model.model} reads text only"
        raise ConfigError(f"encode of model {model.name!r}", Described("a pool"), limit)
    for role in model.pools:
        engine = model.engine_config(role)
        config.kv_heads_per_rank(engine.tensor_parallel_size)
        config.longest_sequence(engine.max_model_len)
        if role != "encode":
            shown = text_only(config) if engine.language_model_only else config
            check_stages(engine, shown)
            check_experts(engine, shown)


def _chat_template(given: str | None) -> str | None:
    """Return the text of a template. Raises ConfigError for an unreadable file."""
    if given is None or any(char in given for char in "{}\n"):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        limit = f"a text file that can be read, or a template in Jinja ({type(error).__name__})"
        raise ConfigError("chat_template", given, limit) from None


def _max_new_tokens(model: ModelSection, sampling: dict[str, Any]) -> int | None:
    """Return the limit of all answers, which only the configuration sets: a model's own file sets a default."""
    if model.generation_config in ("auto", "vllm"):
        return model.override_generation_config.get("max_new_tokens")
    return sampling.get("max_tokens")


def _default_sampling(model: ModelSection, folder: Path) -> dict[str, Any]:
    """Return the default sampling parameters of requests. Raises StartupError."""
    source, override = model.generation_config, model.override_generation_config
    sampling = default_sampling(folder, source, override)
    try:
        msgspec.convert(sampling, SamplingParams)
    except (InvalidParameter, msgspec.ValidationError) as error:
        raise ConfigError("override_generation_config", sampling, f"valid ({error})") from None
    return sampling
