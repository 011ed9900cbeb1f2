"""Options of kernels, and of graphs of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from engine.config_options import check_limits, option
from engine.engine_options import EngineOptions


@dataclass(frozen=True, kw_only=True)
class KernelOptions(EngineOptions):
    enforce_eager: bool = option(
        False,
        "Launch every kernel separately, without CUDA graphs. Slower, with the same tokens.",
    )
    disable_custom_all_reduce: bool = option(
        False,
        "Let ranks on one machine use only NCCL or gloo for sums, without shared memory (docs/gpu.md).",
    )
    allow_untested_kernels: bool = option(
        False,
        "Let a GPU compute recurrent layers, latent attention, adapters and quantized experts by kernels that were not "
        "run on a GPU yet. Without this option, an engine that needs them does not start (docs/gpu.md).",
    )
    determinism: Literal["strict"] | None = option(
        None,
        "`strict` gives the same tokens and log-probabilities, bit for bit, with any number of ranks and in any batch "
        "(docs/determinism.md). Needs CPUs and unquantized weights.",
    )
    torch_compile: bool = option(
        False,
        "Compile the model's layers, except attention, with torch.compile when the engine starts (docs/gpu.md). "
        "`enforce_eager` overrides this option.",
    )
    cuda_graph_memory_gib: float = option(
        1.0,
        "GPU memory kept free for CUDA graphs. A step without a graph of its size is padded to a "
        "larger one, or runs without a graph.",
    )

    @property
    def added_to_layers(self) -> tuple[str, ...]:
        """What features add to the products of layers, in the plural."""
        return ()

    @classmethod
    def for_adapters(cls) -> dict[str, Any]:
        """Return the options that engines need to compute a model with adapters."""
        return {}

    def without_layers(self) -> dict[str, Any]:
        """Return the options by which an engine without a language model differs."""
        return {"enforce_eager": True, "torch_compile": False, "allow_untested_kernels": True}

    def for_kernels(self) -> dict[str, Any]:
        """Return the options that change which kernels layers use, in a small engine that tries each."""
        return {"allow_untested_kernels": self.allow_untested_kernels}

    def check(self) -> None:
        super().check()
        check_limits(self, {"at least 0": "cuda_graph_memory_gib"})
