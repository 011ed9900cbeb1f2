"""Manta's inference engine: one model on one group of ranks. It never imports Ray.

from engine import LLM, SamplingParams
"""

import os
from typing import TYPE_CHECKING, Any

# How often a thread spins at an OpenMP barrier before it sleeps; read once, when torch loads OpenMP. The default spins
# for milliseconds, so a single other busy process on the cores would make a step ten times longer.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

from engine.offline.lora_request import LoRARequest
from engine.wire.parts.pooling import PoolingParams
from engine.wire.sampling_params import SamplingParams
from engine.wire.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from engine.offline.llm import LLM

__all__ = ["LLM", "LoRARequest", "PoolingParams", "SamplingParams", "StructuredOutputsParams"]


def __getattr__(name: str) -> Any:
    """Import `LLM` on first use. It takes seconds to load torch, which an ingress does not need."""
    if name == "LLM":
        from engine.offline.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
