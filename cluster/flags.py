"""Command-line flags generated from dataclass fields, so that name, type, default and help of a flag are written
once."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from cluster.config.flag_groups import GROUP_OF
from engine.config import EngineConfig
from engine.offline.vllm_flags import SHORT_FLAGS

WITHOUT = {"model", "handoff", "encode", "seed"}  # fields set in other ways, or of no use to a server

ModelOption = Annotated[str, typer.Option(help="`pocket` (bundled), a model folder, a GGUF file, or a Hub id.")]
ApiKeyOption = Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key of the server.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one line of JSON, for programs.")]


def _in_a_folder(path: Path | None) -> Path | None:
    """Return the path of a report. Raises BadParameter, before anything is measured, if its folder does not exist."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"{path.parent} is not a folder")
    return path


HtmlOption = Annotated[
    Path | None,
    typer.Option(dir_okay=False, callback=_in_a_folder, help="Also write a report with charts to this file."),
]
EngineFlags = Annotated[dict[str, Any], EngineConfig]
"""Type of a command's parameter for the fields of EngineConfig that are flags."""


def flag(default: Any, help: str, *names: str, **details: Any) -> Any:
    """Return a dataclass field that is a flag. names: names of the flag, if not the field's. details: arguments of
    typer.Option."""
    return field(default=default, metadata={"help": help, "names": names, **details})


def with_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Typer command made from a function: each field of a dataclass or EngineFlags parameter becomes a
    flag."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Callable[..., Any], list[inspect.Parameter]]] = {}
    for own in inspect.signature(command, eval_str=True).parameters.values():
        if own.annotation == EngineFlags:
            groups[own.name] = given, engine_flags()
        elif is_dataclass(own.annotation) and isinstance(own.annotation, type):
            groups[own.name] = own.annotation, flags_of(own.annotation)
        else:
            parameters.append(own.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        options = {
            name: make(**{flag.name: values.pop(flag.name) for flag in flags}) for name, (make, flags) in groups.items()
        }
        return command(**values, **options)

    parameters += [flag for _, flags in groups.values() for flag in flags]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def flags_of(options: type) -> list[inspect.Parameter]:
    """Return the flags of a dataclass, shown in the group that its PANEL names, or in theirs.

    The metadata of a field are `names` and arguments of typer.Option, such as `help`.
    """
    hints, flags = get_type_hints(options), []
    for f in fields(options):
        details = {"rich_help_panel": getattr(options, "PANEL", None) or GROUP_OF.get(f.name), **f.metadata}
        flags.append(_parameter(f.name, hints[f.name], f.default, *details.pop("names", ()), **details))
    return flags


def engine_flags() -> list[inspect.Parameter]:
    """Return the flags of EngineConfig. Their default is None, which means that a flag is not given."""
    hints, flags = get_type_hints(EngineConfig), []
    for f in fields(EngineConfig):
        if f.name in WITHOUT:
            continue
        kind, dashed = _without_none(hints[f.name]), f.name.replace("_", "-")
        names = [
            f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}",
            *filter(None, [SHORT_FLAGS.get(f.name)]),
        ]
        shown = False if f.default is None or f.default is False else str(f.default)
        details = {"rich_help_panel": GROUP_OF.get(f.name), "help": f.metadata["help"], "show_default": shown}
        if is_dataclass(kind):
            keys = f"{f.metadata['help']} The keys are {', '.join(key.name for key in fields(kind))}."
            kind, details = dict, {**details, "help": keys, "parser": json_object, "metavar": "JSON"}
        flags.append(_parameter(f.name, kind | None, None, *names, **details))
    return flags


def _parameter(name: str, hint: Any, default: Any, *names: str, **details: Any) -> inspect.Parameter:
    annotation = Annotated[hint, typer.Option(*names, **details)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def given(**options: Any) -> dict[str, Any]:
    """Return those of the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def _without_none(hint: Any) -> Any:
    """Return `X` for `X | None`. Raises AssertionError for a type that no flag supports."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
    assert hint in (bool, int, float, str) or get_origin(hint) is Literal or is_dataclass(hint), hint
    return hint


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{text!r} is not a JSON object")
    return value
