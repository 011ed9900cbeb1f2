"""Reads fields of config.json, and names those whose value is not supported."""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]


class Unsupported(Exception):
    """A field of config.json has a value that this engine does not support."""

    def __init__(self, field: str, value: object):
        super().__init__(field, value)
        self.field, self.value = field, value


def one_of(field: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if value not in allowed:
        raise Unsupported(field, value)
    return value
