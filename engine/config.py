"""Configuration of one engine. It is frozen, and contains only values that are known before the engine starts."""

from __future__ import annotations

from dataclasses import dataclass

from engine.options.choices import check_choices
from engine.options.experts import ExpertOptions
from engine.options.handoff import HandoffOptions
from engine.options.holds import HoldOptions
from engine.options.images import ImageOptions
from engine.options.kernels import KernelOptions
from engine.options.kv_check import KVCheckOptions
from engine.options.kv_events import KVEventOptions
from engine.options.kv_tiers import TierOptions
from engine.options.lora import LoRAOptions
from engine.options.speculation import SpeculationOptions
from engine.options.stages import StageOptions
from engine.options.structured_outputs import StructuredOutputOptions
from engine.options.tape import TapeOptions


@dataclass(frozen=True, kw_only=True)
class EngineConfig(
    HandoffOptions,
    TapeOptions,
    SpeculationOptions,
    ExpertOptions,
    StructuredOutputOptions,
    KVEventOptions,
    KVCheckOptions,
    TierOptions,
    HoldOptions,
    LoRAOptions,
    ImageOptions,
    StageOptions,
    KernelOptions,
):
    """Options of one engine, named as in vLLM where the meaning is the same."""

    # of each feature its own; docs/reference.md shows those of the last base first

    def __post_init__(self) -> None:
        check_choices(self)
        self.check()
