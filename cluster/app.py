"""Application builder that serve_config.yaml names: turns `args` into a Serve application."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from cluster import haproxy, ray_serve_llm
from cluster.autoscaling.slo import autoscaling_config
from cluster.config.app_config import AppConfig
from cluster.config.model_section import ModelSection
from cluster.entry_point import BUILDERS
from cluster.model_info import model_info
from deployments import ray_compat
from deployments.decode import Decode
from deployments.ingress import Ingress, IngressOptions
from deployments.openai.served.served_model import ModelInfo
from deployments.prefill import Prefill
from deployments.prefill_decode import PrefillDecode
from deployments.routing.config import Role, RouterOptions
from deployments.routing.router import EngineRouter
from engine.errors import ConfigError, StartupError
from engine.wire.stats.handoff_stats import PeerPool
from placement import capacity
from placement.console_log import LogConfig

logger = logging.getLogger(__name__)

OPTIONS: dict[str, Any] = {  # of every deployment
    "health_check_period_s": 1.0,  # the controller notices the end of a replica only in these checks
    "health_check_timeout_s": 10.0,
    "max_constructor_retry_count": 2,  # a model that fails to load will fail the twentieth time too
    "graceful_shutdown_wait_loop_s": 0.2,  # between a stopping replica's checks whether its last request has ended
}


def build(args: dict[str, Any]) -> Application:
    """Build the application, after all checks that need no weights."""
    try:
        config = AppConfig.parse(args)
        _warn_without_policy(config, args)
        if ray.is_initialized() and ray_compat.takes_commands_of_anybody():
            logger.warning(
                "Ray listens at %s without authentication (RAY_AUTH_MODE is not `token`): "
                "anyone who can connect can run "
            "code on this cluster. See docs/security.md", ray.util.get_node_ip_address(),
            )  # fmt: skip
        _check_tls()
        infos = [model_info(model, config.ingress) for model in config.models]
        _check_capacity(config)
        return ingress(config, infos, [_pools(model, config.log) for model in config.models])
    except StartupError as error:
        ray_compat.end_serve_run(str(error))
        raise


def build_openai_app(args: dict[str, Any]) -> Application:
    """Build the application from `args` of Ray Serve LLM: `llm_configs` (docs/ray_serve_llm.md)."""
    try:
        ours = ray_serve_llm.serving_args(args)
    except StartupError as error:
        ray_compat.end_serve_run(str(error))
        raise
    return build(ours)


build_pd_openai_app = build_openai_app  # `prefill_config` and `decode_config`


def _check_tls() -> None:
    """Raise StartupError if HAProxy would use plain HTTP towards ingresses that have a certificate."""
    if not ray.is_initialized() or os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        return
    certfile, haproxys = ray_compat.certificate(), os.environ.get(haproxy.CERTFILE)
    if certfile != haproxys:
        raise StartupError(
            f"http_options.ssl_certfile is {certfile}, and HAProxy's {haproxys}: set {haproxy.CERTFILE} and "
            f"{haproxy.KEYFILE} to the same files in the environment of `ray start` on every node"
        )


def _warn_without_policy(config: AppConfig, args: dict[str, Any]) -> None:
    """Warn if Serve's own policy would scale the pools, as it silently does if the configuration does not name ours.

    The policy is named next to `args`, but a builder sees only `args`.
    """
    if not config.autoscales or not ray.is_initialized():
        return
    for application in ray_compat.deployed_applications():
        if application["import_path"] in BUILDERS and application.get("args") == args:
            try:
                AppConfig.of(application)
            except ConfigError as error:
                logger.warning("%s. Without it, Serve scales by open requests and ignores `slo`", error)


def ingress(
    config: AppConfig, infos: list[ModelInfo], pools: list[tuple[Application, dict[PeerPool, Application]]]
) -> Application:
    """Return the ingress application. pools: for each model, its decode replicas, and the pools that compute prompts or
    images for them."""
    num = config.ingress.num_replicas
    scaling: dict[str, Any] = {"num_replicas": num}
    if config.autoscales:  # requests waiting in ingresses count as load of the pools
        scaling = {"autoscaling_config": autoscaling_config(num, num, config.ingress.max_ongoing_requests)}
    deployment = serve.deployment(
        Ingress,
        name=ray_compat.INGRESS,
        max_ongoing_requests=config.ingress.max_ongoing_requests,
        ray_actor_options={"num_cpus": config.ingress.num_cpus},
        graceful_shutdown_timeout_s=config.ingress.drain_s,
        max_surge_percent=100,  # start a new ingress before stopping an old one, so that one always takes connections
        **OPTIONS,
        **scaling,
    )
    edge = config.ingress
    options = IngressOptions(
        log=config.log,
        tracing=config.tracing_config(),
        auth=edge.auth(),
        batches=edge.batches(),
        store=edge.store_config(),
        console=config.console_config(),
        images=edge.image_config(),
    )
    return deployment.bind(infos, pools, options)


def _check_capacity(config: AppConfig) -> None:
    """Raise StartupError if the cluster could not hold a replica of some model even if it were empty."""
    if not ray.is_initialized():
        return
    nodes = capacity.cluster_nodes()
    warn_of_idle_gpus(config, nodes)
    for model in config.models:
        for role in model.deployments.values():
            problem = capacity.missing(model.group_spec(role), nodes)
            if problem is None:
                continue
            if not capacity.can_grow(nodes):
                raise StartupError(f"model {model.name!r}, {role}: {problem}")
            logger.warning("model %r waits for new nodes for %s: %s", model.name, role, problem)


def warn_of_idle_gpus(config: AppConfig, nodes: Sequence[capacity.Node]) -> None:
    """Warn if the cluster has GPUs but no rank asks for one: Ray then hides them, so all models run on CPUs."""
    gpus = sum(node.resources.get("GPU", 0.0) for node in nodes)
    if gpus and not any(pool.num_gpus for model in config.models for pool in model.pools.values()):
        logger.warning(
            "the cluster has %g GPU%s, but all models run on CPUs: set `decode.num_gpus: 1`, or --num-gpus 1", gpus,
            "" if gpus == 1 else "s",
        )  # fmt: skip


def _pools(model: ModelSection, log: LogConfig) -> tuple[Application, dict[PeerPool, Application]]:
    """Return a model's decode pool, and the pools that compute prompts or images for it."""

    def pool(kind: type[Decode] | type[Prefill], role: Role, peers: dict[PeerPool, Application]) -> Application:
        spec = replace(model.group_spec(role), log=log)
        return _deployment(kind, model, role).bind(model.engine_config(role), spec, peers)

    order: tuple[PeerPool, ...] = ("encode", "prefill")  # in this order, since encode engines serve prefill engines too
    peers: dict[PeerPool, Application] = {}
    for role in order:
        if role in model.deployments.values():
            peers = {**peers, role: pool(Prefill, role, peers)}
    return pool(PrefillDecode if model.switches_roles else Decode, "decode", peers), peers


def _deployment(kind: type[Decode] | type[Prefill], model: ModelSection, role: Role) -> serve.Deployment:
    engine, spec, section = model.engine_config(role), model.group_spec(role), model.pools[role]
    roles: tuple[Role, ...] = ("decode", "prefill") if kind is PrefillDecode else (role,)
    pools = {name: model.pools[name].routing_config() for name in roles}
    routing = asdict(RouterOptions(block_size=engine.known_block_size, pools=pools))
    return serve.deployment(
        kind,
        name=f"{'pd' if kind is PrefillDecode else role}-{model.name}",
        max_ongoing_requests=section.max_ongoing_requests
        or engine.slots + engine.data_parallel_size * engine.max_waiting,
        request_router_config=RequestRouterConfig(request_router_class=EngineRouter, request_router_kwargs=routing),
        ray_actor_options={"num_cpus": spec.control_cpus},
        placement_group_bundles=spec.bundles,
        placement_group_strategy=spec.strategy,
        graceful_shutdown_timeout_s=section.drain_s,
        **OPTIONS,
        **_replicas(model, role),
        **({"placement_group_bundle_label_selector": spec.label_selectors} if spec.label_selectors else {}),
    )


def _replicas(model: ModelSection, role: Role) -> dict[str, Any]:
    """Return the scaling options of a pool. A pool of fixed size also reports its load if another pool of the model
    scales, or if roles change."""
    low, high = model.bounds(role)
    if not model.autoscales:
        return {"num_replicas": low}
    settings = model.pool_settings(role)
    return {"autoscaling_config": autoscaling_config(low, high, settings.limits.max_num_seqs, settings)}
