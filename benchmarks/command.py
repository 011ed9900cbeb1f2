"""A benchmark as a command of its own: `python -m benchmarks.NAME`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

import typer

from engine.errors import ServingError

Report = TypeVar("Report", bound=Any)  # a dataclass
ModelOption = Annotated[str, typer.Option(help="`pocket` (bundled), a Hugging Face model folder, or a Hub id.")]
DtypeOption = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
SeedOption = Annotated[int, typer.Option(help="Seed of the random prompts.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one line of JSON, for programs.")]


def run(main: Callable[..., None], arguments: list[str] | None = None) -> None:
    """Run `main` with the process's arguments; an error that the user can mend is one line and exit code 1."""
    command = typer.Typer(add_completion=False)
    command.command()(main)
    try:
        command(arguments)
    except ServingError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


def print_report(report: Report, as_json: bool, show: Callable[[Report], None]) -> None:
    """Print a dataclass as one line of JSON, or show its tables."""
    if as_json:
        print_json(asdict(report))
    else:
        show(report)


def print_json(fields: dict[str, Any] | list[dict[str, Any]]) -> None:
    print(json.dumps(fields, allow_nan=False))
