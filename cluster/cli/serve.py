"""`manta serve`: runs the application described by its flags or by a serve_config.yaml."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from cluster import ray_environment
from cluster.cli.help import CliCommand
from cluster.entry_point import HOST, PORT
from cluster.flags import EngineFlags, with_flags
from cluster.serve_flags import (
    API_KEY_VARIABLES,
    YAML,
    ModelFlags,
    ReplicaFlags,
    ServerFlags,
    SetOption,
    configuration,
    http_options,
    model_keys,
    server_keys,
    set_keys,
)
from cluster.server_ports import KNOWN_PORTS, agent_ports, given_ports
from cluster.vllm.command import translated
from deployments.http.server_header import SERVER_VARIABLE
from engine.errors import InvalidParameter, StartupError
from engine.model.checkpoint import smollm2


class TakesVllmFlags(CliCommand):
    """A command that accepts the flags of `vllm serve`, and prints one line about the flags that it ignores."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the arguments. Raises RequestError for a vLLM flag that must be written differently here."""
        command = translated(args)
        if command.warning:
            print(f"manta: {command.warning}", file=sys.stderr, flush=True)
        return super().parse_args(ctx, command.args)


@with_flags
def serve(
    flags: ModelFlags,
    server: ServerFlags,
    replicas: ReplicaFlags,
    engine: EngineFlags,
    model: Annotated[
        str,
        typer.Argument(
            help="`smollm2` (`manta pull smollm2`), `pocket` (bundled), a Hugging Face model folder, a GGUF file, a "
            "Hub id, or a serve_config.yaml. `default` is smollm2 if it was fetched, otherwise pocket."
        ),
    ] = smollm2.DEFAULT,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the equivalent serve_config.yaml and exit.")
    ] = False,
    sets: SetOption = None,
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="On a terminal, show a line for each request when it ends.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(
            help="Address of a running Ray cluster, or `auto` to find one on this machine. Default: $RAY_ADDRESS; if "
            "it is not set, start a Ray."
        ),
    ] = None,
) -> None:
    """Serve a model behind an OpenAI-compatible API, until Ctrl-C.

    --print-config prints the serve_config.yaml equivalent to the flags, for `manta serve FILE`, `serve deploy` and
    KubeRay.

    Examples:

      manta serve

      manta serve meta-llama/Llama-3.1-8B-Instruct --num-gpus 1

      manta serve /models/Qwen3-32B -tp 4 --num-gpus 1 --prefill-replicas 2

      manta serve serve_config.yaml
    """
    given = model_keys(flags, engine) | server_keys(server, replicas) | set_keys(sets)
    if not model.endswith(YAML):
        model = model if flags.revision is None else f"{model}@{flags.revision}"
        serve_config = configuration(model, given, {"host": HOST, "port": PORT, **http_options(server)})
    else:
        others = bool(given) or flags.revision is not None or print_config
        serve_config = written_configuration(Path(model), server, flags=others)
    if print_config:
        print(yaml.safe_dump(serve_config, sort_keys=False), end="")
        return
    say_what_the_default_is(serve_config)
    set_environment(serve_config, address)
    check(serve_config, address)
    run(serve_config, address, log_requests=log_requests)


def written_configuration(file: Path, server: ServerFlags, *, flags: bool) -> dict[str, Any]:
    """Return the Serve configuration in a file. Raises InvalidParameter if there are flags too: some in `server`, or
    others (`flags`)."""
    if server.api_key:
        raise InvalidParameter("--api-key", "a key", "left out, as must MANTA_API_KEY: put keys into the file")
    if flags or http_options(server):
        raise InvalidParameter(
            "MODEL",
            str(file),
            "a model, because flags cannot be combined with a configuration file: write their keys into the file",
        )
    from cluster.serve_config import load  # `manta --help` does without

    return load(file)


def say_what_the_default_is(serve_config: Mapping[str, Any]) -> None:
    """If the default model has not been fetched, print one line about which model answers instead."""
    sections = [application.get("args") or {} for application in serve_config.get("applications") or ()]
    models = [model for given in sections for model in given.get("models") or ()]
    asked = any(isinstance(model, dict) and model.get("model") == smollm2.DEFAULT for model in models)
    if asked and smollm2.default_model() != smollm2.NAME:
        message = (
            f"manta: serves the pocket model, because {smollm2.NAME} has not been fetched (manta pull {smollm2.NAME})"
        )
        print(message, file=sys.stderr, flush=True)


def check(serve_config: dict[str, Any], address: str | None) -> None:
    """Raise StartupError for any mistake that can be found before anything starts.

    address: address of a running Ray cluster, which has already taken its ports.
    """
    from cluster.cli.check.names import check_facade, check_folder
    from cluster.cli.check.ports import check_ports
    from cluster.serve_config import (  # `manta --help` does without
        address_of,
        check_serve_config,
        memory_may_be_short,
        ours,
    )

    for finding in (*check_facade(), *check_folder(Path.cwd())):
        raise StartupError(str(finding))
    check_serve_config(serve_config)
    findings = list(check_ports(*address_of(serve_config)))
    if memory_may_be_short(serve_config):
        from cluster.cli.check.model_fit import check_models, this_machine  # seconds: torch and Ray
        from cluster.config.app_config import AppConfig

        for _, application in ours(serve_config):
            findings += check_models(AppConfig.of(application), [this_machine()], here=True)
    problems = [finding for finding in findings if finding.level == "problem"]
    if problems and address is None and not _joins_a_cluster():
        raise StartupError(f"{problems[0].topic} {problems[0].message}. {problems[0].advice}".strip())


def ray_address_file() -> Path:
    """Return the file to which `ray start` writes its address on this machine, without importing Ray."""
    system = os.environ.get("TMPDIR", "/tmp") if sys.platform == "linux" else "/tmp"
    return Path(os.environ.get("RAY_TMPDIR", system), "ray", "ray_current_cluster")


def _joins_a_cluster() -> bool:
    """Return whether Ray will find a running cluster on this machine by itself."""
    return bool(os.environ.get("RAY_ADDRESS")) or ray_address_file().exists()


def starts_ray(address: str | None) -> bool:
    """Return whether Ray will be started, rather than joined."""
    return address == "local" or (address is None and not _joins_a_cluster())


def set_environment(serve_config: Mapping[str, Any], address: str | None) -> None:
    """Remove API keys, and set the variables that Ray reads when it is imported, unless the user has set them."""
    http_options = serve_config.get("http_options") or {}
    environment = ray_environment.environment() | ray_environment.tls_environment(http_options)
    if starts_ray(address):
        environment |= ray_environment.own_environment()
        os.environ.pop(SERVER_VARIABLE, None)  # inherited if this server was started from another one
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    for name in API_KEY_VARIABLES:
        os.environ.pop(name, None)


def run(serve_config: dict[str, Any], address: str | None, *, log_requests: bool = False) -> None:
    """Serve until Ctrl-C. A terminal shows the start, totals and problems. Every log line is printed instead if the
    output is not a terminal, with `log_format: json`, or with a `log_level` that hides the lines that the display
    needs."""
    for name, port in given_ports().items():
        if port != KNOWN_PORTS[name].number:
            print(f"{KNOWN_PORTS[name].use} are on port {port}", file=sys.stderr, flush=True)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as under nohup
        print(f"Ctrl-C has no effect here; stop with: kill {os.getpid()}", file=sys.stderr, flush=True)
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
        given["log_format"] = "json"  # the terminal display parses it
    with ServeTerminal(Console(stderr=True), log_requests=log_requests) as terminal:
        serve_until_interrupted(serve_config, address, terminal, agent_ports=ports)
