"""Fields of a configuration: their help texts, and checks of their values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, field, fields
from functools import cache
from math import inf
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from engine.errors import ConfigError

LIMITS: dict[str, Callable[[float], bool]] = {
    "at least 0": lambda value: 0 <= value < inf,
    "at least 1": lambda value: value >= 1,
    "above 0": lambda value: value > 0,
    "between 0 and 1": lambda value: 0 <= value <= 1,
    "above 0 and at most 1": lambda value: 0 < value <= 1,
}

T = TypeVar("T")


def check_choices(config: Any, section: str = "") -> None:
    """Raise ConfigError for a field whose value is not among the choices of its Literal type."""
    for key, choices, may_be_left_out in _choices(type(config)):  # type: ignore[arg-type]  # a type is hashable
        value = getattr(config, key)
        if value not in choices and not (value is None and may_be_left_out):
            left_out = ", or left out" if may_be_left_out else ""
            limit = f"{'one of ' if len(choices) > 1 else ''}{', '.join(choices)}{left_out}"
            raise ConfigError(f"{section}{key}", value, limit)


@cache
def _choices(config: type) -> list[tuple[str, list[str], bool]]:
    """Return the fields of a Literal type: name, choices, and whether it may be None."""
    found = []
    for key, hint in get_type_hints(config).items():
        kinds = hint, *get_args(hint)
        choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
        if choices:
            found.append((key, choices, NoneType in kinds))
    return found


def check_limits(config: Any, limits: dict[str, str], section: str = "") -> None:
    """Raise ConfigError for a field outside its limit. limits: names of fields by a key of LIMITS."""
    for limit, names in limits.items():
        for key in names.split():
            value, may_be_left_out = getattr(config, key), config.__dataclass_fields__[key].default is None
            if value is not None and not LIMITS[limit](value):
                raise ConfigError(f"{section}{key}", value, f"{limit}{', or left out' if may_be_left_out else ''}")


def option(default: T, help: str, **flag: Any) -> T:
    """Return a dataclass field with a help text, which `--help` shows too. flag: further arguments of
    `typer.Option`."""
    return field(default=default, metadata={"help": help, **flag})


def set_section(config: Any, section: str, kind: type[Any]) -> None:
    """Parse a section of a frozen configuration, if it is a dict of options. Raises ConfigError."""
    if isinstance(given := getattr(config, section), dict):
        object.__setattr__(config, section, parse_section(kind, section, given))


def parse_section(config: type[T], section: str, options: dict[str, Any]) -> T:
    """Return the dataclass with these options. Raises ConfigError for unknown keys and wrong values."""
    hints = get_type_hints(config)
    for key, value in options.items():
        if key not in hints:
            raise ConfigError(f"{section}.{key}", value, f"left out; the known keys are {', '.join(hints)}")
        kind, kinds = hints[key], get_args(hints[key])
        if kind in (int, bool) and type(value) is not kind:
            raise ConfigError(f"{section}.{key}", value, "an integer" if kind is int else "true or false")
        if kind is float and type(value) not in (int, float):
            raise ConfigError(f"{section}.{key}", value, "a number")
        if (kind is str or str in kinds) and not isinstance(value, str | (NoneType if kinds else str)):
            raise ConfigError(f"{section}.{key}", value, "a string")
    for f in fields(config):  # type: ignore[arg-type]
        if f.default is MISSING and f.name not in options:
            raise ConfigError(f"{section}.{f.name}", None, "given")
    return config(**options)
