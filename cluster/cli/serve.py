"""`manta serve`: flags, or a serve_config.yaml, to a running application."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
import yaml

from cluster import haproxy
from cluster.autoscaling.slo import POLICY
from cluster.cli.flags import with_engine_flags
from cluster.config import BUILDER, HOST, PORT
from engine.errors import ConfigError, InvalidParameter, StartupError

API, REPLICAS = "API", "Replicas"
ABOVE_MODELS = ("ingress", "log_format", "log_level", "tracing")  # keys of `args` that do not belong to a model
YAML = (".yaml", ".yml")


@with_engine_flags
def serve(
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
    address: Annotated[
        str | None,
        typer.Option(help="Of a running Ray, or `auto`. Default: $RAY_ADDRESS, or a Ray of its own."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(rich_help_panel=API, help="What clients send as `model`. Default: MODEL's last part.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(rich_help_panel=API, help="0.0.0.0 listens on all interfaces.", show_default=HOST)
    ] = None,
    port: Annotated[int | None, typer.Option(rich_help_panel=API, min=1, max=65535, show_default=str(PORT))] = None,
    api_keys_file: Annotated[
        str | None, typer.Option(rich_help_panel=API, help="Who may come in; see `manta hash-key`. Default: everybody.")
    ] = None,
    tool_call_parser: Annotated[
        str | None, typer.Option(rich_help_panel=API, help="Default: read off the chat template.")
    ] = None,
    reasoning_parser: Annotated[
        str | None, typer.Option(rich_help_panel=API, help="Default: read off the chat template.")
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None, typer.Option(rich_help_panel=API, show_default="info")
    ] = None,
    num_replicas: Annotated[
        int | None,
        typer.Option(
            "--num-replicas",
            "--decode-replicas",
            rich_help_panel=REPLICAS,
            help="That answer requests.",
            show_default="1",
        ),
    ] = None,
    max_replicas: Annotated[
        int | None,
        typer.Option(rich_help_panel=REPLICAS, help="In place of a fixed number: load decides (docs/autoscaling.md)."),
    ] = None,
    min_replicas: Annotated[
        int | None, typer.Option(rich_help_panel=REPLICAS, help="With --max-replicas.", show_default="1")
    ] = None,
    prefill_replicas: Annotated[
        int | None,
        typer.Option(rich_help_panel=REPLICAS, help="That only compute prompts for the others (docs/handoff.md)."),
    ] = None,
    num_cpus: Annotated[
        float | None,
        typer.Option(rich_help_panel=REPLICAS, help="Of each rank of a replica.", show_default="1"),
    ] = None,
    num_gpus: Annotated[
        float | None, typer.Option(rich_help_panel=REPLICAS, help="Of each rank; at most 1.", show_default="0")
    ] = None,
    accelerator_type: Annotated[
        str | None, typer.Option(rich_help_panel=REPLICAS, help="GPU that a rank needs, as Ray names it: L4, H100.")
    ] = None,
    *,
    engine: dict[str, Any],
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
    given: dict[str, Any] = {
        "name": served_model_name,
        "tool_call_parser": tool_call_parser,
        "reasoning_parser": reasoning_parser,
        "engine": engine,
        "decode.num_replicas": num_replicas,
        "decode.min_replicas": min_replicas,
        "decode.max_replicas": max_replicas,
    }
    ranks = {"num_cpus": num_cpus, "num_gpus": num_gpus, "accelerator_type": accelerator_type}
    given |= {f"decode.{key}": value for key, value in ranks.items()}
    if prefill_replicas is not None:
        given |= {"prefill.num_replicas": prefill_replicas}
        given |= {f"prefill.{key}": value for key, value in ranks.items()}
    given |= {"ingress.api_keys_file": api_keys_file, "log_level": log_level}
    given |= dict(map(_key_and_value, sets or ()))
    given = {key: value for key, value in given.items() if value not in (None, {})}
    if model.endswith(YAML):
        if given or print_config or host is not None or port is not None:
            raise InvalidParameter("MODEL", model, "a model where flags are given; a file says all by itself")
        from cluster.cli.check.serve_config import load  # `manta --help` does without

        check(load(Path(model)), address)
        run(Path(model), address)
    http: dict[str, Any] = {"host": host or HOST, "port": port or PORT}
    serve_config = configuration(model, given, http)
    text = yaml.safe_dump(serve_config, sort_keys=False)
    if print_config:
        print(text, end="")
        return
    check(serve_config, address)
    with unnamed_file(text) as config:
        run(config, address)


def configuration(model: str, given: dict[str, Any], http: dict[str, Any]) -> dict[str, Any]:
    """A Serve configuration of one model.

    given: keys of its section, or of what stands above all models, by their paths (`decode.num_cpus`).
    http: host, port.
    """
    section: dict[str, Any] = {"name": Path(model).name, "model": model}
    args: dict[str, Any] = {"models": [section]}
    for path, value in given.items():
        *parents, key = path.split(".")
        place = args if (parents or [key])[0] in ABOVE_MODELS else section
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ConfigError(path, value, f"below a section, which {parent} is not")
        place[key] = value
    application = {
        "name": "manta",
        "route_prefix": "/",
        "import_path": BUILDER,
        "autoscaling_policy": {"policy_function": POLICY},
        "args": args,
    }
    return {"http_options": http, "applications": [application]}


def check(serve_config: dict[str, Any], address: str | None) -> None:
    """Raises StartupError for whatever can be seen before anything starts. address: of the Ray cluster that is there
    already, and so has its ports."""
    from cluster.cli.check.serve_config import address_of, check_serve_config  # `manta --help` does without
    from cluster.cli.ports import check_ports

    check_serve_config(serve_config)
    problems = [finding for finding in check_ports(*address_of(serve_config)) if finding.level == "problem"]
    if problems and address is None and not _joins_a_cluster():
        raise StartupError(f"port {problems[0].told}. {problems[0].advice}")


def _joins_a_cluster() -> bool:
    """Whether `serve run` finds a Ray of this machine, from `ray start`, by itself."""
    from ray._common.utils import get_ray_address_file  # seconds

    return bool(os.environ.get("RAY_ADDRESS")) or Path(get_ray_address_file(None)).exists()


def run(config: Path, address: str | None = None) -> NoReturn:
    """Let `serve run` take the place of this process."""
    command = [sys.executable, "-m", "ray.serve.scripts", "run"]
    command += [] if address is None else ["--address", address]
    os.execve(sys.executable, [*command, str(config)], haproxy.environment() | dict(os.environ))


@contextmanager
def unnamed_file(text: str) -> Iterator[Path]:
    """A path under which `text` can be read once, also by what takes the place of this process, after which nobody
    would be left to delete a file."""
    with tempfile.TemporaryFile("w") as file:
        file.write(text)
        file.seek(0)  # also writes it out
        os.set_inheritable(file.fileno(), True)
        yield Path(f"/dev/fd/{file.fileno()}")


def _key_and_value(text: str) -> tuple[str, Any]:
    """`handoff.policy=always`; the value is YAML."""
    key, equals, value = text.partition("=")
    try:
        if not key or not equals:
            raise ValueError(text)
        return key, yaml.safe_load(value)
    except (ValueError, yaml.YAMLError):
        raise InvalidParameter("--set", text, "KEY=VALUE, for instance handoff.policy=always") from None
