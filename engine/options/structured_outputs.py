"""Options of structured outputs."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config_options import option
from engine.engine_options import EngineOptions
from engine.options.section import set_section


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsConfig:
    """Options of structured outputs, named as in vLLM (docs/structured_outputs.md)."""

    disable_additional_properties: bool = option(
        True,
        "Whether an object whose JSON schema lists properties, and says nothing of others, has no others. This also "
        "holds for the arguments of calls that are enforced. vLLM's default differs for its backend guidance.",
    )


@dataclass(frozen=True, kw_only=True)
class StructuredOutputOptions(EngineOptions):
    structured_outputs_config: StructuredOutputsConfig | None = option(
        None, "Structured outputs, as a JSON object of vLLM's keys (docs/structured_outputs.md)."
    )

    @property
    def structured_outputs(self) -> StructuredOutputsConfig:
        return self.structured_outputs_config or StructuredOutputsConfig()

    def check(self) -> None:
        super().check()
        set_section(self, "structured_outputs_config", StructuredOutputsConfig)
