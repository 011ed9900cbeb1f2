"""Facts that the API needs about a model, from its folder and its configuration. Loads no weights, and no torch."""

from __future__ import annotations

import hashlib
from importlib.metadata import version

from cluster.config import IngressSection, ModelSection
from deployments.frontend.admission import AdmissionLimits
from deployments.openai.served_model import ModelInfo
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model import folder as model_folder
from engine.model.config import ModelConfig
from engine.text.tokenizer import Tokenizer
from engine.wire.model_identity import ModelIdentity, short

NUMERICS = ("dtype", "quantization", "kv_cache_dtype", "device", "load_format", "torch_compile", "tensor_parallel")


def model_info(model: ModelSection, ingress: IngressSection) -> ModelInfo:
    """Read the facts of a model. Raises StartupError for a model that could not be loaded."""
    folder = model_folder.resolve(model.model)
    config = ModelConfig.from_folder(folder)
    generates = "generate" in config.supported_tasks
    if model.prefill is not None and not generates:
        tasks = " or ".join(config.supported_tasks.names)
        limit = f"left out: {model.model} can only {tasks}, so there is nothing to do after the prompt"
        raise ConfigError(f"prefill of model {model.name!r}", "a pool", limit)
    for role in model.pools:
        engine = model.engine_config(role)
        config.kv_heads_per_rank(engine.tensor_parallel)
        config.longest_sequence(engine.max_model_len)
    Tokenizer.from_folder(folder, decodes=generates)
    identity = ModelIdentity.of(folder)
    shares_prefixes = not config.bidirectional and config.pooling.type == "last"  # a mean needs every token
    return ModelInfo(
        name=model.name,
        root=model.model,
        folder=str(folder),
        identity=identity,
        fingerprint=fingerprint(identity, model.engine_config()),
        max_model_len=config.longest_sequence(model.engine_config().max_model_len),
        vocab_size=config.vocab_size,
        default_sampling=model_folder.default_sampling(folder),
        request_timeout_s=ingress.request_timeout_s,
        admission=AdmissionLimits(
            max_num_seqs=model.engine_config().max_num_seqs,
            num_engines=max(1, model.decode.bounds[0]),
            num_ingresses=ingress.num_replicas,
            max_waiting=ingress.max_waiting,
            max_waiting_tokens=ingress.max_waiting_tokens,
        ),
        block_size=model.engine_config().shared_block_size if shares_prefixes else None,
        supported_tasks=config.supported_tasks,
        may_sleep=model.decode.bounds[0] == 0,
        max_replays=ingress.max_replays,
        has_priorities=model.engine_config().scheduling_policy == "priority",
        tool_call_parser=model.tool_call_parser,
        reasoning_parser=model.reasoning_parser,
    )


def fingerprint(identity: ModelIdentity, engine: EngineConfig) -> str:
    """Return what responses name as `system_fingerprint`: a digest of whatever may change the answer to a request."""
    numerics = [getattr(engine, name) for name in NUMERICS]
    return f"fp_{short(hashlib.sha256(repr((identity.weights, numerics, version('manta-serve'))).encode()))}"
