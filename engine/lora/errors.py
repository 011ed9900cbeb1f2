"""Errors of adapters."""

from __future__ import annotations

from engine.errors import InvalidParameter


class AdapterError(InvalidParameter):
    """A LoRA adapter cannot be used with this model. `field` is a key of its configuration, or one of its files."""

    def __init__(self, adapter: str, field: str, value: object, limit: str):
        super().__init__(field, value, limit)
        self.args = (adapter, *self.args)
        self.message, self.param = f"adapter {adapter!r}: {self.message}", "model"
        self.adapter = adapter

    @classmethod
    def without_slots(cls, adapter: str) -> AdapterError:
        """Return the error of an engine that takes no adapters at all."""
        return cls(adapter, "lora", adapter, "left out: this engine has no adapters")


class AdapterNotFound(AdapterError):
    status, type = 404, "not_found_error"
