"""Flags of `manta serve`, and the configuration keys that they set."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml
from typer.exceptions import TyperException
from typer.main import get_command

from cluster.autoscaling.slo import POLICY
from cluster.entry_point import BUILDER, HOST, PORT
from cluster.flags import EngineFlags, flag, with_flags
from deployments.frontend.api_keys import key_line
from engine.bucket_url import is_bucket
from engine.errors import ConfigError, InvalidParameter, RequestError

ABOVE_MODELS = ("ingress", "log_format", "log_level", "tracing")  # keys of `args` that do not belong to a model
API_KEY_VARIABLES = ["MANTA_API_KEY", "VLLM_API_KEY"]
YAML = (".yaml", ".yml")  # ends of a MODEL that is a serve_config.yaml

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set any key of the configuration, for instance handoff.policy=always, prefill.num_cpus=2 or "
        "ingress.num_replicas=2. Repeatable.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags:
    served_model_name: list[str] | None = flag(  # noqa: RUF009  the default is None
        None, "Name that clients send as `model`. Repeatable. Default: the last part of MODEL."
    )
    revision: str | None = flag(None, "Branch, tag or commit of a Hub id.")
    chat_template: str | None = flag(None, "File with a Jinja chat template. Default: the model's own.")
    default_chat_template_kwargs: str | None = flag(
        None, "Variables of the chat template: '{\"enable_thinking\": false}'."
    )
    generation_config: str | None = flag(
        None, "Source of the sampling defaults: auto (the model's), vllm (none), or a folder."
    )
    override_generation_config: str | None = flag(
        None, "Sampling defaults that take precedence over --generation-config: '{\"temperature\": 0.6}'."
    )
    tool_call_parser: str | None = flag(None, "Format of tool calls. Default: inferred from the chat template.")
    reasoning_parser: str | None = flag(None, "Format of reasoning. Default: inferred from the chat template.")
    lora_modules: list[str] | None = flag(  # noqa: RUF009  the default is None
        None, "LoRA adapter: NAME=PATH, or JSON with name, path and base_model_name. Repeatable."
    )
    lora_dynamic_folder: str | None = flag(
        None,
        "Folder of LoRA adapters, on a disk or in a bucket. Each sub-folder is an adapter, "
        "served under the sub-folder's name.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFlags:
    host: str | None = flag(None, "Address to listen on; 0.0.0.0 for all interfaces.", show_default=HOST)
    port: int | None = flag(None, "Port to listen on.", min=1, max=65535, show_default=str(PORT))
    api_keys_file: str | None = flag(None, "File of API keys; see `manta hash-key`. Default: every client is admitted.")
    api_key: list[str] | None = flag(  # noqa: RUF009  the default is None
        None, "API key to accept; only its hash is kept. Repeatable.", envvar=API_KEY_VARIABLES
    )
    ssl_certfile: str | None = flag(None, "Serve HTTPS with this certificate (PEM file).")
    ssl_keyfile: str | None = flag(None, "Private key of the certificate (PEM file).")
    allowed_origins: str | None = flag(None, "Origins of web pages that may send requests: '[\"https://a.example\"]'.")
    allow_runtime_lora_updating: bool | None = flag(
        None, "Let requests load and unload LoRA adapters.", envvar="VLLM_ALLOW_RUNTIME_LORA_UPDATING"
    )
    root_path: str | None = flag(None, "Prefix that a proxy in front of this server adds to all paths, such as /llm.")
    log_level: Literal["debug", "info", "warning", "error"] | None = flag(
        None, "Least severe messages to log.", show_default="info"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFlags:
    num_replicas: int | None = flag(None, "Replicas that answer requests.", show_default="1")
    max_replicas: int | None = flag(None, "Scale with the load, up to this number of replicas (docs/autoscaling.md).")
    min_replicas: int | None = flag(None, "Minimum number of replicas with --max-replicas.", show_default="1")
    prefill_replicas: int | None = flag(None, "Replicas that only compute prompts (docs/handoff.md).")
    num_cpus: float | None = flag(None, "CPUs of each rank of a replica.", show_default="1")
    num_gpus: float | None = flag(None, "GPUs of each rank, at most 1; 0 computes on CPUs.", show_default="0")
    accelerator_type: str | None = flag(None, "GPU type that each rank needs, by Ray's name: L4, H100.")


NO_SERVER = ServerFlags()


def http_options(server: ServerFlags) -> dict[str, Any]:
    """Return the keys of Serve's `http_options` that the flags set, with their values."""
    options: dict[str, Any] = {"host": server.host, "port": server.port}
    for key in ("ssl_certfile", "ssl_keyfile"):
        file = getattr(server, key)
        options[key] = file and str(Path(file).absolute())
    return {key: value for key, value in options.items() if value is not None}


def model_keys(model: ModelFlags, engine: dict[str, Any]) -> dict[str, Any]:
    """Return the values that the flags set in a model's section, by the path of the key."""
    names, template = model.served_model_name or [], model.chat_template
    keys: dict[str, Any] = {
        "name": names[0] if names else None,
        "aliases": names[1:] or None,
        "chat_template": template and str(Path(template).absolute()) if Path(template or "").is_file() else template,
        "default_chat_template_kwargs": _json(model, "default_chat_template_kwargs", dict),
        "generation_config": model.generation_config,
        "override_generation_config": _json(model, "override_generation_config", dict),
        "tool_call_parser": model.tool_call_parser,
        "reasoning_parser": model.reasoning_parser,
        "lora_modules": [module for text in model.lora_modules or () for module in _lora_modules(text)] or None,
        "lora.dynamic_folder": model.lora_dynamic_folder and _adapters_folder(model.lora_dynamic_folder),
        "engine": engine or None,
    }
    return {key: value for key, value in keys.items() if value is not None}


def server_keys(server: ServerFlags, replicas: ReplicaFlags) -> dict[str, Any]:
    """Return the values that the flags set in the sections of pools and ingress, by the path of the key."""
    keys: dict[str, Any] = {
        "decode.num_replicas": replicas.num_replicas,
        "decode.min_replicas": replicas.min_replicas,
        "decode.max_replicas": replicas.max_replicas,
        "prefill.num_replicas": replicas.prefill_replicas,
        "ingress.api_keys_file": server.api_keys_file,
        "ingress.api_keys": [key_line(f"key-{i}", key) for i, key in enumerate(server.api_key or (), 1)] or None,
        "ingress.allowed_origins": _json(server, "allowed_origins", list),
        "ingress.allow_runtime_lora_updating": server.allow_runtime_lora_updating,
        "ingress.root_path": server.root_path,
        "log_level": server.log_level,
    }
    for pool in ("decode",) if replicas.prefill_replicas is None else ("decode", "prefill"):
        for key in ("num_cpus", "num_gpus", "accelerator_type"):
            keys[f"{pool}.{key}"] = getattr(replicas, key)
    return {key: value for key, value in keys.items() if value is not None}


def set_keys(sets: list[str] | None) -> dict[str, Any]:
    """Return the values that --set sets, by the path of the key. Values are YAML. Raises InvalidParameter."""
    keys = {}
    for text in sets or ():
        key, equals, value = text.partition("=")
        try:
            if not key or not equals:
                raise ValueError(text)
            keys[key] = yaml.safe_load(value)
        except (ValueError, yaml.YAMLError):
            raise InvalidParameter("--set", text, "KEY=VALUE, for instance handoff.policy=always") from None
    return keys


@with_flags
def _keys(flags: ModelFlags, replicas: ReplicaFlags, engine: EngineFlags, sets: SetOption = None) -> dict[str, Any]:
    return model_keys(flags, engine) | server_keys(NO_SERVER, replicas) | set_keys(sets)


def keys_of(args: list[str]) -> dict[str, Any]:
    """Return the values that flags of a model, its replicas and its engine set, by the path of the key. Raises
    RequestError for an unknown flag."""
    command = typer.Typer(add_completion=False)
    command.command()(_keys)
    try:
        found: dict[str, Any] = get_command(command)(args, standalone_mode=False)
    except TyperException as error:
        raise RequestError(error.format_message()) from None
    return found


def model_args(model: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return `args` of an application with one model. Raises ConfigError.

    given: values by path (`decode.num_cpus`), of keys in the model's section or in the sections above all models.
    """
    section: dict[str, Any] = {"name": os.path.basename(os.path.abspath(model)).partition("@")[0], "model": model}
    args: dict[str, Any] = {"models": [section]}
    for path, value in given.items():
        *parents, key = path.split(".")
        target = args if (parents or [key])[0] in ABOVE_MODELS else section
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise ConfigError(path, value, f"a key inside a section, but {parent} is not a section")
        target[key] = value
    return args


def configuration(model: str, given: dict[str, Any], http: dict[str, Any]) -> dict[str, Any]:
    """Return a Serve configuration with one model. given: as for model_args. http: host and port."""
    application = {
        "name": "manta",
        "route_prefix": "/",
        "import_path": BUILDER,
        "autoscaling_policy": {"policy_function": POLICY},
        "args": model_args(model, given),
    }
    return {"http_options": http, "applications": [application]}


def _adapters_folder(given: str) -> str:
    return given if is_bucket(given) else str(Path(given).expanduser().absolute())


def _lora_modules(text: str) -> list[dict[str, Any]]:
    """Return the adapters that a value of --lora-modules names. Raises InvalidParameter."""
    name, equals, path = text.partition("=")
    if equals and not text.lstrip().startswith(("{", "[")):
        return [{"name": name, "path": _absolute(path)}]
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    modules = found if isinstance(found, list) else [found]
    if not all(isinstance(module, dict) for module in modules):
        raise InvalidParameter("--lora-modules", text, "NAME=PATH, or JSON with name and path")
    read = {"is_3d_lora_weight"}  # the file says it
    return [{k: _absolute(v) if k == "path" else v for k, v in module.items() if k not in read} for module in modules]


def _absolute(path: Any) -> Any:
    """Return the absolute path of an existing folder. Anything else, such as a Hub id, is returned unchanged."""
    folder = Path(str(path)).expanduser()
    return str(folder.absolute()) if folder.is_dir() else path


def _json(flags: ModelFlags | ServerFlags, name: str, kind: type) -> Any:
    """Return the value of a JSON flag; None if it is not given. Raises InvalidParameter."""
    text = getattr(flags, name)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, kind):
        raise InvalidParameter(
            f"--{name.replace('_', '-')}", text, f"JSON, {'an object' if kind is dict else 'a list'}"
        )
    return value
