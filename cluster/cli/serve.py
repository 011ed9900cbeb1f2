"""`manta serve`: runs the application that its flags, or a serve_config.yaml, stand for."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import typer
import yaml

from cluster import ray_environment
from cluster.autoscaling.slo import POLICY
from cluster.config import BUILDER, HOST, PORT
from cluster.flags import EngineFlags, flag, with_flags
from cluster.server_ports import KNOWN_PORTS, agent_ports, given_ports
from deployments.frontend.api_keys import key_line
from deployments.http.server_header import SERVER_VARIABLE
from engine.errors import ConfigError, InvalidParameter, StartupError

ABOVE_MODELS = ("ingress", "log_format", "log_level", "tracing")  # keys of `args` that do not belong to a model
YAML = (".yaml", ".yml")
API_KEY_VARIABLES = ["MANTA_API_KEY", "VLLM_API_KEY"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiFlags:
    PANEL: ClassVar = "API"
    served_model_name: list[str] | None = flag(  # noqa: RUF009  the default is None
        None, "What clients send as `model`; may be given more than once. Default: MODEL's last part."
    )
    revision: str | None = flag(None, "Branch, tag or commit of a Hub id.")
    host: str | None = flag(None, "0.0.0.0 listens on all interfaces.", show_default=HOST)
    port: int | None = flag(None, "", min=1, max=65535, show_default=str(PORT))
    api_keys_file: str | None = flag(None, "Who may come in; see `manta hash-key`. Default: everybody.")
    api_key: list[str] | None = flag(  # noqa: RUF009  the default is None
        None, "A key that may come in; only its hash is kept.", envvar=API_KEY_VARIABLES
    )
    ssl_certfile: str | None = flag(None, "HTTPS with this certificate (PEM).")
    ssl_keyfile: str | None = flag(None, "Its private key.")
    allowed_origins: str | None = flag(
        None, "Web pages that may send requests from browsers: '[\"https://a.example\"]'."
    )
    root_path: str | None = flag(None, "Prefix of all paths at a proxy in front, such as /llm.")
    chat_template: str | None = flag(None, "A file of Jinja. Default: the model's own.")
    default_chat_template_kwargs: str | None = flag(None, "Variables of it: '{\"enable_thinking\": false}'.")
    generation_config: str | None = flag(None, "Defaults of sampling: auto, vllm (none), or a folder.")
    override_generation_config: str | None = flag(None, "Single ones: '{\"temperature\": 0.6}'.")
    tool_call_parser: str | None = flag(None, "Default: read off the chat template.")
    reasoning_parser: str | None = flag(None, "Default: read off the chat template.")
    log_level: Literal["debug", "info", "warning", "error"] | None = flag(None, "", show_default="info")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFlags:
    PANEL: ClassVar = "Replicas"
    num_replicas: int | None = flag(
        None, "Replicas that answer requests.", "--num-replicas", "--decode-replicas", show_default="1"
    )
    max_replicas: int | None = flag(None, "In place of a fixed number: load decides (docs/autoscaling.md).")
    min_replicas: int | None = flag(None, "With --max-replicas.", show_default="1")
    prefill_replicas: int | None = flag(None, "Replicas that only compute prompts for the others (docs/handoff.md).")
    num_cpus: float | None = flag(None, "CPUs of each rank of a replica.", show_default="1")
    num_gpus: float | None = flag(None, "GPUs of each rank; at most 1.", show_default="0")
    accelerator_type: str | None = flag(None, "GPU that a rank needs, as Ray names it: L4, H100.")


@with_flags
def serve(
    api: ApiFlags,
    replicas: ReplicaFlags,
    engine: EngineFlags,
    model: Annotated[
        str,
        typer.Argument(help="`pocket` (bundled), a Hugging Face model folder, a Hub id; or a serve_config.yaml."),
    ] = "pocket",
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the serve_config.yaml that these flags stand for, and end.")
    ] = False,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any key of the configuration, for instance handoff.policy=always, prefill.num_cpus=2 or "
            "ingress.num_replicas=2. May be given more than once.",
        ),
    ] = None,
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="On a terminal: also show each request that ends.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(help="Address of a running Ray, or `auto`. Default: $RAY_ADDRESS, or a Ray of its own."),
    ] = None,
) -> None:
    """Serve a model behind an OpenAI-compatible API, until Ctrl-C.

    The flags stand for the very same application as a serve_config.yaml.
    --print-config shows it, for `manta serve FILE`, `serve deploy` and KubeRay.

    Examples:

      manta serve

      manta serve meta-llama/Llama-3.1-8B-Instruct --num-gpus 1

      manta serve /models/Qwen3-32B -tp 4 --num-gpus 1 --prefill-replicas 2

      manta serve serve_config.yaml
    """
    given = given_keys(api, replicas, engine) | dict(map(_key_and_value, sets or ()))
    if not model.endswith(YAML):
        model = model if api.revision is None else f"{model}@{api.revision}"
        serve_config = configuration(model, given, {"host": HOST, "port": PORT, **http_options(api)})
    else:
        serve_config = written_configuration(Path(model), api, flags=bool(given) or print_config)
    if print_config:
        print(yaml.safe_dump(serve_config, sort_keys=False), end="")
        return
    set_environment(serve_config, address)
    check(serve_config, address)
    run(serve_config, address, log_requests=log_requests)


def http_options(api: ApiFlags) -> dict[str, Any]:
    """Return the keys of Serve's `http_options` that the flags set."""
    options: dict[str, Any] = {"host": api.host, "port": api.port}
    for key in ("ssl_certfile", "ssl_keyfile"):
        file = getattr(api, key)
        options[key] = file and str(Path(file).absolute())
    return {key: value for key, value in options.items() if value is not None}


def given_keys(api: ApiFlags, replicas: ReplicaFlags, engine: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a configuration that the flags set, by their paths."""
    names, template = api.served_model_name or [], api.chat_template
    keys: dict[str, Any] = {
        "name": names[0] if names else None,
        "aliases": names[1:] or None,
        "chat_template": template and str(Path(template).absolute()) if Path(template or "").is_file() else template,
        "default_chat_template_kwargs": _json(api, "default_chat_template_kwargs", dict),
        "generation_config": api.generation_config,
        "override_generation_config": _json(api, "override_generation_config", dict),
        "tool_call_parser": api.tool_call_parser,
        "reasoning_parser": api.reasoning_parser,
        "engine": engine or None,
        "decode.num_replicas": replicas.num_replicas,
        "decode.min_replicas": replicas.min_replicas,
        "decode.max_replicas": replicas.max_replicas,
        "prefill.num_replicas": replicas.prefill_replicas,
        "ingress.api_keys_file": api.api_keys_file,
        "ingress.api_keys": [key_line(f"key-{i}", key) for i, key in enumerate(api.api_key or (), 1)] or None,
        "ingress.cors_origins": _json(api, "allowed_origins", list),
        "ingress.root_path": api.root_path,
        "log_level": api.log_level,
    }
    for pool in ("decode",) if replicas.prefill_replicas is None else ("decode", "prefill"):
        for key in ("num_cpus", "num_gpus", "accelerator_type"):
            keys[f"{pool}.{key}"] = getattr(replicas, key)
    return {key: value for key, value in keys.items() if value is not None}


def written_configuration(file: Path, api: ApiFlags, *, flags: bool) -> dict[str, Any]:
    """Return the Serve configuration in a file. Raises InvalidParameter if flags say more, in `api` or elsewhere."""
    if api.api_key:
        raise InvalidParameter("--api-key", "a key", "left out, also MANTA_API_KEY, where a file says all by itself")
    if flags or http_options(api) or api.revision:
        raise InvalidParameter("MODEL", str(file), "a model where flags are given; a file says all by itself")
    from cluster.cli.check.serve_config import load  # `manta --help` does without

    return load(file)


def configuration(model: str, given: dict[str, Any], http: dict[str, Any]) -> dict[str, Any]:
    """Return a Serve configuration of one model.

    given: keys of the model's section, or of the sections above all models, by their paths (`decode.num_cpus`).
    http: host and port.
    """
    section: dict[str, Any] = {"name": Path(model).name.partition("@")[0], "model": model}
    args: dict[str, Any] = {"models": [section]}
    for path, value in given.items():
        *parents, key = path.split(".")
        target = args if (parents or [key])[0] in ABOVE_MODELS else section
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise ConfigError(path, value, f"below a section, which {parent} is not")
        target[key] = value
    application = {
        "name": "manta",
        "route_prefix": "/",
        "import_path": BUILDER,
        "autoscaling_policy": {"policy_function": POLICY},
        "args": args,
    }
    return {"http_options": http, "applications": [application]}


def check(serve_config: dict[str, Any], address: str | None) -> None:
    """Raise StartupError for any mistake that can be seen before anything starts.

    address: of a Ray cluster that is running, and so has its ports already.
    """
    from cluster.cli.check.names import check_folder
    from cluster.cli.check.ports import check_ports
    from cluster.cli.check.serve_config import (  # `manta --help` does without
        address_of,
        check_serve_config,
        memory_may_be_short,
    )

    for finding in check_folder(Path.cwd()):
        raise StartupError(str(finding))
    check_serve_config(serve_config)
    findings = list(check_ports(*address_of(serve_config)))
    if memory_may_be_short(serve_config):
        from cluster.cli.check.doctor import check_fit  # seconds: torch and Ray

        findings += check_fit(serve_config)
    problems = [finding for finding in findings if finding.level == "problem"]
    if problems and address is None and not _joins_a_cluster():
        raise StartupError(f"{problems[0].topic} {problems[0].message}. {problems[0].advice}".strip())


def ray_address_file() -> Path:
    """Return the file in which `ray start` writes its address on this machine, without importing Ray for it."""
    system = os.environ.get("TMPDIR", "/tmp") if sys.platform == "linux" else "/tmp"
    return Path(os.environ.get("RAY_TMPDIR", system), "ray", "ray_current_cluster")


def _joins_a_cluster() -> bool:
    """Return whether Ray will find a cluster on this machine by itself, started by `ray start`."""
    return bool(os.environ.get("RAY_ADDRESS")) or ray_address_file().exists()


def starts_ray(address: str | None) -> bool:
    """Return whether Ray will be started, and not joined."""
    return address == "local" or (address is None and not _joins_a_cluster())


def set_environment(serve_config: Mapping[str, Any], address: str | None) -> None:
    """Set what Ray reads as it is imported, where the user has not, and forget the keys of the API."""
    http_options = serve_config.get("http_options") or {}
    environment = ray_environment.environment() | ray_environment.tls_environment(http_options)
    if starts_ray(address):
        environment |= ray_environment.own_environment()
        os.environ.pop(SERVER_VARIABLE, None)  # of a server that this one was started from
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    for name in API_KEY_VARIABLES:
        os.environ.pop(name, None)


def run(serve_config: dict[str, Any], address: str | None, *, log_requests: bool = False) -> None:
    """Serve until Ctrl-C. A terminal shows the start, totals and problems. Every log line is printed elsewhere, with
    `log_format: json`, and with a `log_level` that leaves out the lines that a terminal needs."""
    for name, port in given_ports().items():
        if port != KNOWN_PORTS[name].number:
            print(f"{KNOWN_PORTS[name].use} are at port {port}", file=sys.stderr, flush=True)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as under nohup
        print(f"Ctrl-C is ignored here; to stop: kill {os.getpid()}", file=sys.stderr, flush=True)
    from deployments.ray_driver import serve_until_interrupted  # Ray takes a while to import

    ports = agent_ports() if sys.platform == "linux" and starts_ray(address) else {}
    args = [application.get("args") or {} for application in serve_config.get("applications", ())]
    plain = any(given.get("log_format") == "json" or given.get("log_level") in ("warning", "error") for given in args)
    if plain or not sys.stderr.isatty():
        serve_until_interrupted(serve_config, address, agent_ports=ports)
        return
    from rich.console import Console

    from cluster.cli.serve_terminal import ServeTerminal

    for given in args:
        given["log_format"] = "json"  # which the terminal reads
    with ServeTerminal(Console(stderr=True), log_requests=log_requests) as terminal:
        serve_until_interrupted(serve_config, address, terminal, agent_ports=ports)


def _json(api: ApiFlags, name: str, kind: type) -> Any:
    """Return the value of a flag in JSON; None if it is not given. Raises InvalidParameter."""
    text = getattr(api, name)
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


def _key_and_value(text: str) -> tuple[str, Any]:
    """Split `handoff.policy=always`; the value is YAML."""
    key, equals, value = text.partition("=")
    try:
        if not key or not equals:
            raise ValueError(text)
        return key, yaml.safe_load(value)
    except (ValueError, yaml.YAMLError):
        raise InvalidParameter("--set", text, "KEY=VALUE, for instance handoff.policy=always") from None
