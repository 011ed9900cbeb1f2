"""Options that have one of a few values."""

from __future__ import annotations

from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from engine.errors import ConfigError


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
