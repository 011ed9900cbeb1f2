"""The error of all that reads `quantization_config`. Imports no torch, as its formats do."""

from __future__ import annotations


class UnsupportedScheme(Exception):
    """A key of `quantization_config` has a value that this engine cannot honour."""

    def __init__(self, key: str, value: object, limit: str):
        super().__init__(key, value, limit)
        self.key, self.value, self.limit = key, value, limit
