"""How callers of the offline API name a low-rank adapter."""

from __future__ import annotations

from typing import Self

import msgspec

from engine.errors import InvalidParameter
from engine.wire.parts.adapter import ModelAdapter


class LoRARequest(msgspec.Struct, frozen=True):
    """A low-rank adapter (LoRA, arXiv:2106.09685) in PEFT's format, named as in vLLM."""

    lora_name: str
    """The adapter's name; it does not affect the result."""
    lora_int_id: int = 0
    """vLLM's number of the adapter; it has no effect."""
    lora_path: str = ""
    """Folder or Hub id."""
    digest: str = ""
    """`AdapterFiles.digest`; if it is empty, it is read from the files."""

    def with_digest(self) -> Self:
        if not (self.lora_path and isinstance(self.lora_path, str)):
            raise InvalidParameter("lora_request", self, "LoRARequest(lora_name, lora_int_id, lora_path)")
        if self.digest:
            return self
        from engine.lora.adapter_files import open_adapter  # here, since prompts without adapters do without

        return msgspec.structs.replace(self, digest=open_adapter(self.lora_path, self.lora_name).digest)

    def adapter(self) -> ModelAdapter:
        return ModelAdapter(self.lora_name, self.lora_path, self.digest)
