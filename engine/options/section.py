"""Sections of a configuration: options that are given as one object."""

from __future__ import annotations

from dataclasses import MISSING, fields
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from engine.errors import ConfigError

T = TypeVar("T")


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
