"""Options of adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.config_options import check_limits, option
from engine.errors import ConfigError
from engine.options.experts import ExpertOptions
from engine.options.kernels import KernelOptions

MAX_LORA_RANK = 256
DEFAULT_LORAS = 8


@dataclass(frozen=True, kw_only=True)
class LoRAOptions(KernelOptions):
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

    @property
    def added_to_layers(self) -> tuple[str, ...]:
        return (*super().added_to_layers, *(("adapters",) if self.enable_lora else ()))

    @classmethod
    def for_adapters(cls) -> dict[str, Any]:
        return super().for_adapters() | {"enable_lora": True}

    def without_layers(self) -> dict[str, Any]:
        return super().without_layers() | {"enable_lora": False}

    def for_kernels(self) -> dict[str, Any]:
        slots = 1 if self.enable_lora else None
        own = {"enable_lora": self.enable_lora, "max_loras": slots, "max_lora_rank": self.max_lora_rank}
        return super().for_kernels() | own

    def check(self) -> None:
        super().check()
        if self.enable_lora and self.of(ExpertOptions).enable_eplb:
            raise ConfigError("enable_eplb", True, "false with enable_lora, because adapters of experts do not move")
        if self.enable_lora and self.torch_compile:
            raise ConfigError("torch_compile", True, "false with enable_lora, because compiled layers have no adapters")
        check_limits(self, {"at least 1": "max_loras"})
        if not 1 <= self.max_lora_rank <= MAX_LORA_RANK:
            raise ConfigError("max_lora_rank", self.max_lora_rank, f"between 1 and {MAX_LORA_RANK}")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.lora_slots:
            limit = f"at least max_loras ({self.max_loras or 1}), or left out"
            raise ConfigError("max_cpu_loras", self.max_cpu_loras, limit)
