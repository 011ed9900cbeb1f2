"""A model of each family with three adapters on all its linear layers, and what PEFT answers with them."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from engine.wire.parts.adapter import ModelAdapter
from tests.answers import MAX_TOKENS, prompt
from tests.engine.lora.peft_adapters import Reference, load, make_adapter
from tests.models import FAMILIES, HYBRIDS, make_model
from tests.transformers_models import make_transformers_model

NATIVE = [*FAMILIES, *HYBRIDS]
BACKEND = (
    "SmolLM3ForCausalLM", "Cohere2ForCausalLM", "GPTNeoXForCausalLM", "NemotronForCausalLM",
    "GraniteMoeSharedForCausalLM", "Exaone4ForCausalLM",
)  # fmt: skip
ALL = (*NATIVE, *BACKEND)
# Of some models PEFT does not take all linear layers: it refuses the output of Mamba's layers, and it takes Kimi's
# convolutions for linear layers.
TARGETS: dict[str, Any] = {
    **dict.fromkeys(("nemotron_h", "falcon_h1"), ("in_proj", "q_proj", "k_proj", "v_proj", "o_proj")),
    # PEFT takes experts for a part of MLPs, and its adapters of these experts are refused
    "longcat_flash": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    "kimi_linear": r".*\.(q|k|v|o|kv_a|kv_b|gate|up|down|b|f_a|f_b|g_a|g_b)_proj(_with_mqa)?",
}


class AdaptedModel:
    def __init__(self, root: Path, family: str):
        self.folder = (make_model if family in NATIVE else make_transformers_model)(root / "model", family)
        parameters = [] if family == "longcat_flash" else experts(self.folder)
        config = {"target_modules": TARGETS.get(family, "all-linear"), "target_parameters": parameters}
        patterns = {"rank_pattern": {"layers.0.self_attn.o_proj": 2}, "alpha_pattern": {"o_proj": 16}}
        self.adapters = [
            make_adapter(root / "one", self.folder, 1, **config, **patterns),
            make_adapter(root / "two", self.folder, 2, rank=8, use_rslora=True, **config),
            make_adapter(root / "three", self.folder, 3, rank=2, **config),
        ]

    @property
    def requests(self) -> dict[str, tuple[list[int], ModelAdapter | None]]:
        """Two prompts with each adapter and without one."""
        names = [(lora.name, lora) for lora in self.adapters]
        return {f"{name} {i}": (prompt(9 + 9 * i), lora) for i in range(2) for name, lora in [*names, ("none", None)]}

    @cached_property
    def expected(self) -> dict[str, list[int]]:
        """PEFT's answers to the requests, which are the same with adapters merged into the model and beside it."""
        reference = Reference(self.folder, MAX_TOKENS)
        merged, beside = (
            {name: reference.tokens(*request, merged=merged) for name, request in self.requests.items()}
            for merged in (True, False)
        )
        assert merged == beside
        assert len(set(map(tuple, merged.values()))) == len(merged), "the adapters do nothing"
        return merged


def experts(folder: Path) -> list[str]:
    """Return the parameters that hold a weight for each expert."""
    names = [name for name, parameter in load(folder).named_parameters() if parameter.dim() == 3]
    return sorted({".".join(name.split(".")[-2:]) for name in names if ".experts." in name})
