"""Flags of a command that would be ignored because of others. Imports no typer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from engine.errors import InvalidParameter


class IdleFlag(InvalidParameter):
    """A flag must be left out, whatever its value is."""

    def __init__(self, flag: str, value: object, limit: str):
        super().__init__(flag, value, limit)
        self.message = f"{flag} must be {limit}"


def given_flags(options: Any) -> dict[str, Any]:
    """Return the values of a dataclass that are not at their default, by flag."""
    values = {each.name: (getattr(options, each.name), each.default) for each in fields(options)}
    found = {name.replace("_", "-"): value for name, (value, default) in values.items() if value != default}
    return {f"--no-{name}" if value is False else f"--{name}": value for name, value in found.items()}


def refuse_idle(given: Mapping[str, Any], *rules: tuple[str, bool, str]) -> None:
    """Raise IdleFlag for a flag that would be ignored. given: values by flag, None if it is not given. rules: flags,
    separated by spaces; whether they are ignored; and when they must be left out."""
    for names, ignored, when in rules:
        for name in names.split():
            if ignored and given.get(name) is not None:
                raise IdleFlag(name, given[name], f"left out {when}")
