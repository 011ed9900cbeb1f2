"""Defines the error for an unsupported `quantization_config`, without importing torch, which the formats need."""

from __future__ import annotations


class UnsupportedScheme(Exception):
    """A key of `quantization_config` has a value that this engine does not support."""

    def __init__(self, key: str, value: object, limit: str):
        super().__init__(key, value, limit)
        self.key, self.value, self.limit = key, value, limit
