"""Command-line flags from the fields of EngineConfig: one list, which cannot drift apart from another."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from engine.config import EngineConfig

PANEL, SWITCHES = "Engine", "Engine: switches"  # apart, since names of two kinds side by side leave no room
WITHOUT = {"model", "handoff", "seed"}  # given in other ways, or of no use to a server
NAMES = {"tensor_parallel": ("--tensor-parallel-size", "-tp")}  # vLLM's, where the field has another name


def with_engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """A Typer command that has, beside its own parameters, a flag for each field of EngineConfig.

    command: takes those that are given as `engine`, by their names.
    """
    own = list(inspect.signature(command, eval_str=True).parameters.values())
    flags = engine_flags()

    @functools.wraps(command)
    def run(**given: Any) -> None:
        engine = {flag.name: given.pop(flag.name) for flag in flags}
        command(**given, engine={name: value for name, value in engine.items() if value is not None})

    parameters = [*(parameter for parameter in own if parameter.name != "engine"), *flags]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def engine_flags() -> list[inspect.Parameter]:
    """None, the default of each, stands for a flag that is not given."""
    hints = get_type_hints(EngineConfig)
    flags = []
    for field in fields(EngineConfig):
        if field.name in WITHOUT:
            continue
        kind, dashed = _without_none(hints[field.name]), field.name.replace("_", "-")
        names = NAMES.get(field.name, (f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}",))
        option = typer.Option(
            *names,
            rich_help_panel=SWITCHES if kind is bool else PANEL,
            help=field.metadata["help"],
            show_default=False if field.default is None else str(field.default),
        )
        annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
        flags.append(inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return flags


def _without_none(hint: Any) -> Any:
    """`X` of `X | None`. Raises AssertionError for what no flag can say."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
    assert hint in (bool, int, float, str) or get_origin(hint) is Literal, hint
    return hint
