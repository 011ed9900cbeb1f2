"""Manta's inference engine: one model on one group of ranks. Knows nothing of Ray.

from engine import LLM, SamplingParams
"""

import os
from typing import TYPE_CHECKING, Any

# Before torch loads its OpenMP, which reads this once: how many turns a thread spins at a barrier before it sleeps. By
# default it spins for milliseconds, so that one other busy process on the cores makes a step ten times longer.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

from engine.wire.sampling_params import SamplingParams
from engine.wire.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from engine.offline.llm import LLM

__all__ = ["LLM", "SamplingParams", "StructuredOutputsParams"]


def __getattr__(name: str) -> Any:
    """`LLM` brings torch with it: seconds that a process which only speaks text (the ingress) need not spend."""
    if name == "LLM":
        from engine.offline.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
