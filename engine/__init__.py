"""Manta's inference engine: one model on one group of ranks. Knows nothing of Ray.

from engine import LLM, SamplingParams
"""

from typing import TYPE_CHECKING, Any

from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine.llm import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """`LLM` brings torch with it: seconds that a process which only speaks text (the ingress) need not spend."""
    if name == "LLM":
        from engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
