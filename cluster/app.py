"""serve_config.yaml -> a Serve application."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from ray import serve
from ray.serve import Application

from cluster.config import AppConfig, IngressSection, ModelSection
from deployments import ray_compat
from deployments.decode import Decode
from deployments.ingress import Ingress
from deployments.openai.served_model import ModelInfo
from engine import model_folder
from engine.config import EngineConfig
from engine.errors import ConfigError, StartupError
from engine.model_config import ModelConfig
from engine.tokenizer import Tokenizer

HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 10.0
CONSTRUCTOR_TRIES = 2  # a model that cannot be loaded will not load the twentieth time either
SHUTDOWN_POLL_S = 0.2  # how soon a replica notices that its last request has ended


def build(args: dict[str, Any]) -> Application:
    """The builder named in serve_config.yaml. All that can be checked without loading weights is checked here."""
    try:
        return _build(AppConfig.parse(args))
    except StartupError as error:
        ray_compat.end_serve_run(str(error))
        raise


def check(path: Path) -> list[str]:
    """Names of the models that a Serve configuration file would serve.

    Raises StartupError for whatever can be seen without loading weights or starting Ray.
    """
    try:
        applications = yaml.safe_load(path.read_text())["applications"]
        ours = [app for app in applications if app["import_path"] == f"{build.__module__}:{build.__name__}"]
    except (OSError, yaml.YAMLError, LookupError, TypeError) as error:
        raise ConfigError(str(path), f"{type(error).__name__}: {error}", "a Serve configuration file") from None
    configs = [AppConfig.parse(app.get("args") or {}) for app in ours]
    return [_info(model, config.ingress).name for config in configs for model in config.models]


def _build(config: AppConfig) -> Application:
    infos = [_info(model, config.ingress) for model in config.models]
    handles = [_decode(model) for model in config.models]
    ingress = serve.deployment(
        Ingress,
        name=ray_compat.INGRESS,
        num_replicas=config.ingress.num_replicas,
        max_ongoing_requests=config.ingress.max_ongoing_requests,
        ray_actor_options={"num_cpus": config.ingress.num_cpus},
        graceful_shutdown_timeout_s=config.ingress.drain_s,
        graceful_shutdown_wait_loop_s=SHUTDOWN_POLL_S,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        max_constructor_retry_count=CONSTRUCTOR_TRIES,
    )
    return ingress.bind(infos, handles)


def _decode(model: ModelSection) -> Application:
    engine, spec, section = model.engine_config(), model.group_spec(), model.decode
    deployment = serve.deployment(
        Decode,
        name=f"decode-{model.name}",
        max_ongoing_requests=section.max_ongoing_requests or engine.max_num_seqs + engine.max_waiting,
        ray_actor_options={"num_cpus": spec.control_cpus},
        placement_group_bundles=spec.bundles,
        placement_group_strategy="PACK",
        graceful_shutdown_timeout_s=section.drain_s,
        graceful_shutdown_wait_loop_s=SHUTDOWN_POLL_S,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        max_constructor_retry_count=CONSTRUCTOR_TRIES,
        **_replicas(model, engine),
    )
    return deployment.bind(engine, spec)


def _replicas(model: ModelSection, engine: EngineConfig) -> dict[str, Any]:
    """Options of a Serve deployment."""
    section = model.decode
    if section.max_replicas is None:
        return {"num_replicas": section.num_replicas}
    autoscaling = {
        "min_replicas": section.min_replicas or 1,
        "max_replicas": section.max_replicas,
        "target_ongoing_requests": section.target_ongoing_requests or engine.max_num_seqs / 2,
    }
    return {"autoscaling_config": autoscaling}


def _info(model: ModelSection, ingress: IngressSection) -> ModelInfo:
    """Raises StartupError for a model that could not be loaded."""
    folder = model_folder.resolve(model.model)
    config = ModelConfig.from_folder(folder)
    Tokenizer.from_folder(folder)
    return ModelInfo(
        name=model.name,
        root=model.model,
        folder=str(folder),
        max_model_len=model.engine_config().max_model_len or config.max_position_embeddings,
        vocab_size=config.vocab_size,
        default_sampling=model_folder.default_sampling(folder),
        request_timeout_s=ingress.request_timeout_s,
    )
