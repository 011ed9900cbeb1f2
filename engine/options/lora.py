"""Options of adapters."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config_options import check_limits, option
from engine.engine_options import EngineOptions
from engine.errors import ConfigError

MAX_LORA_RANK = 256
DEFAULT_LORAS = 8


@dataclass(frozen=True, kw_only=True)
class LoRAOptions(EngineOptions):
    enable_lora: bool = option(False, "Compute requests with low-rank adapters (LoRA) of the model.")
    max_loras: int | None = option(
        None,
        "Number of different adapters in one step. Memory for this number is reserved in addition to the model. "
        "Default: 8, or `max_cpu_loras` if that is less.",
    )
    max_lora_rank: int = option(
        16,
        "Highest rank of an adapter, at most 256. Every slot takes memory for this rank, so "
        "set it no higher than needed.",
    )
    max_cpu_loras: int | None = option(
        None, "Number of adapters that are kept in host memory, including those in slots. Default: `max_loras`."
    )

    @property
    def lora_slots(self) -> int:
        """Number of different adapters in one step."""
        return self.max_loras or min(DEFAULT_LORAS, max(1, self.max_cpu_loras or DEFAULT_LORAS))

    def check(self) -> None:
        super().check()
        check_limits(self, {"at least 1": "max_loras"})
        if not 1 <= self.max_lora_rank <= MAX_LORA_RANK:
            raise ConfigError("max_lora_rank", self.max_lora_rank, f"between 1 and {MAX_LORA_RANK}")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.lora_slots:
            limit = f"at least max_loras ({self.max_loras or 1}), or left out"
            raise ConfigError("max_cpu_loras", self.max_cpu_loras, limit)
