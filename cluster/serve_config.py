"""Checks of a Serve configuration file that need neither Ray nor weights."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import yaml

from cluster import ray_serve_llm
from cluster.config.app_config import AppConfig
from cluster.entry_point import BUILDERS, HOST, PORT
from cluster.model_info import model_info
from engine.devices.host_memory import free_host_memory
from engine.errors import ConfigError, Described
from engine.model.checkpoint.resolve import resolve

WEIGHTS = (".safetensors", ".gguf")
KV_CACHE_GIB = 2.0  # maximum if the configuration sets nothing

# Keys of Ray's schemas, which silently accept any other; a test compares these with them.
TOP_KEYS = frozenset({
    "proxy_location", "http_options", "grpc_options", "controller_options", "logging_config", "tracing_config",
    "applications", "target_capacity",
})  # fmt: skip
HTTP_KEYS = frozenset({
    "host", "port", "root_path", "request_timeout_s", "keep_alive_timeout_s", "ssl_keyfile", "ssl_certfile",
    "ssl_keyfile_password", "ssl_ca_certs",
})  # fmt: skip
APPLICATION_KEYS = frozenset({
    "name", "route_prefix", "import_path", "runtime_env", "host", "port", "deployments", "autoscaling_policy", "args",
    "logging_config", "external_scaler_enabled",
})  # fmt: skip


def check(path: Path) -> list[str]:
    """Return the names of the models that a Serve configuration file would serve.

    Raises StartupError for any mistake that can be found without loading weights or starting Ray.
    """
    return check_serve_config(load(path))


def check_serve_config(serve_config: dict[str, Any]) -> list[str]:
    """Check the content of a file. Returns and raises like `check`."""
    _check_keys(serve_config, TOP_KEYS, "")
    address_of(serve_config)
    names = []
    for i, application in ours(serve_config):
        _check_keys(application, APPLICATION_KEYS, f"applications[{i}].")
        config = AppConfig.of(application)
        config.ingress.auth()
        names += [model_info(model, config.ingress).name for model in config.models]
        check_deployments(application, config, f"applications[{i}].deployments")
    return names


def memory_may_be_short(serve_config: Mapping[str, Any]) -> bool:
    """Return whether weights and KV caches, judging by file sizes, take more than half of the available memory."""
    needed = 0.0
    for _, application in ours(serve_config):
        for model in AppConfig.of(application).models:
            weights = sum(file.stat().st_size for file in resolve(model.model).iterdir() if file.suffix in WEIGHTS)
            for role, pool in model.pools.items():
                kv_bytes = model.engine_config(role).kv_cache_memory_bytes or KV_CACHE_GIB * 2**30
                needed += pool.bounds[0] * (weights + kv_bytes)
    return needed > free_host_memory().size / 2


def address_of(serve_config: Mapping[str, Any]) -> tuple[str, int]:
    """Return host and port of the API. Raises ConfigError."""
    http = _section(serve_config, "http_options", "")
    _check_keys(http, HTTP_KEYS, "http_options.")
    host, port = http.get("host", HOST), http.get("port", PORT)
    if not isinstance(host, str):
        raise ConfigError("http_options.host", host, "a string, for instance 127.0.0.1")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        raise ConfigError("http_options.port", port, "a port between 1 and 65535")
    _check_certificate(http)
    return host, port


def _check_certificate(http: Mapping[str, Any]) -> None:
    files = {key: http.get(key) for key in ("ssl_certfile", "ssl_keyfile")}
    if not any(files.values()):
        return
    for key, path in files.items():
        if not isinstance(path, str) or not path.startswith("/") or not os.access(path, os.R_OK):
            raise ConfigError(f"http_options.{key}", path, "the absolute path of a PEM file that can be read")
    try:  # else the terminal would prompt for the password of an encrypted key
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(http["ssl_certfile"], http["ssl_keyfile"], password="")
    except ssl.SSLError as error:
        limit = f"the private key of {files['ssl_certfile']}, both PEM, without a password ({error.reason})"
        raise ConfigError("http_options.ssl_keyfile", files["ssl_keyfile"], limit) from None
    for key in ("ssl_keyfile_password", "ssl_ca_certs"):
        if http.get(key):
            raise ConfigError(f"http_options.{key}", Described("a value"), "left out: HAProxy does not use it")


def load(path: Path) -> dict[str, Any]:
    """Read a Serve configuration file. Raises ConfigError."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        problem = (isinstance(error, OSError) and error.strerror) or type(error).__name__
        raise ConfigError(str(path), problem, "a text file that can be read") from None
    return parse(text, str(path))


def parse(text: str, name: str) -> dict[str, Any]:
    """Return a Serve configuration that has at least one Manta application. Raises ConfigError, with a one-line
    message.

    name: name of the file, for messages.
    """
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(name, " ".join(str(error).split()), "YAML") from None
    if not isinstance(found, dict) or not isinstance(found.get("applications"), list):
        raise ConfigError(name, type(found).__name__, "a mapping with a list `applications`, as in Serve")
    found["applications"] = [
        ray_serve_llm.application(given) if isinstance(given, dict) else given for given in found["applications"]
    ]
    if not any(ours(found)):
        others = Described(", ".join(str(each.get("import_path")) for each in found["applications"]) or "none")
        raise ConfigError(name, others, f"given an application whose import_path is {ray_serve_llm.OUR_PATHS}")
    return found


def ours(serve_config: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield Manta's applications, each with its index in the list."""
    for i, application in enumerate(serve_config["applications"]):
        if not isinstance(application, dict) or "import_path" not in application:
            raise ConfigError(f"applications[{i}].import_path", None, "given")
        if application["import_path"] in BUILDERS:
            yield i, application


def _section(parent: Mapping[str, Any], key: str, path: str) -> dict[str, Any]:
    value = parent.get(key)
    if not isinstance(value, dict | None):
        raise ConfigError(f"{path}{key}", value, "a section with keys")
    return value or {}


def _check_keys(section: Mapping[str, Any], known: Set[str], path: str) -> None:
    for key in section:
        if key not in known:
            raise ConfigError(f"{path}{key}", key, f"one of the known keys ({', '.join(sorted(known))})")


def check_deployments(application: Mapping[str, Any], config: AppConfig, path: str) -> None:
    """Check the names of deployments, which Serve does only after building the application."""
    known = ["ingress", *(name for model in config.models for name in model.deployments)]
    for i, deployment in enumerate(application.get("deployments") or []):
        name = deployment.get("name") if isinstance(deployment, dict) else deployment
        if name not in known:
            raise ConfigError(f"{path}[{i}].name", name, f"one of {', '.join(known)}")
