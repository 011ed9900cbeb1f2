"""vLLM's name for an adapter in offline requests."""

from __future__ import annotations

import msgspec

from engine.wire.parts.adapter import ModelAdapter


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter, named as in vLLM."""

    lora_name: str
    """The adapter's name; it does not affect the result."""
    lora_int_id: int = 0
    """vLLM's number of the adapter; it has no effect."""
    lora_path: str = ""
    """Folder or Hub id."""
    digest: str = ""
    """As in ModelAdapter; if it is empty, it is read from the files."""

    @property
    def adapter(self) -> ModelAdapter:
        """The record by which requests name the adapter to engines."""
        return ModelAdapter(self.lora_name, self.lora_path, self.digest)
