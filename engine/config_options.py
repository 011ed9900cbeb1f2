"""Fields of a configuration: their help texts, and limits of their values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from math import inf
from typing import Any, TypeVar

from engine.errors import ConfigError

LIMITS: dict[str, Callable[[float], bool]] = {
    "at least 0": lambda value: 0 <= value < inf,
    "at least 1": lambda value: value >= 1,
    "above 0": lambda value: value > 0,
    "between 0 and 1": lambda value: 0 <= value <= 1,
    "above 0 and at most 1": lambda value: 0 < value <= 1,
}

T = TypeVar("T")


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
