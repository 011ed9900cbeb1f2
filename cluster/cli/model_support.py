"""What is known of an architecture: whose code computes it, what tests compare with transformers, and GGUF files."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from engine.errors import UnsupportedArchitecture
from engine.model import families
from engine.model.checkpoint.gguf import families as gguf
from engine.model.families.family import find_family
from engine.model.families.refused import REFUSED
from engine.model.families.transformers_family import TRANSFORMERS, TransformersFamily

COMPARED = Path(families.__file__).with_name("compared.json")
"""Written by `python -m tests.compared`."""
WELL_KNOWN = COMPARED.with_name("well_known.json")
# Architectures whose GGUF files become another one's folder.
OTHER_GGUF = {"Qwen3NextForCausalLM": ["qwen3next"], "Glm4MoeLiteForCausalLM": ["deepseek2"]}


class Compared(msgspec.Struct, frozen=True):
    """What tests compare with transformers."""

    transformers: str
    """The version."""
    architectures: dict[str, list[str]]
    """What is compared, by architecture."""

    def of(self, architecture: str) -> str:
        """Return what is compared of an architecture, in one line; empty if nothing is."""
        return ", ".join(self.architectures.get(architecture, ()))


class WellKnown(msgspec.Struct, frozen=True):
    """Models that people name most."""

    date: str
    source: str
    models: list[tuple[str, str, str]]
    """Name, architecture in config.json, and the architecture that computes its text part, empty if it is the same."""


@cache
def compared() -> Compared:
    return msgspec.json.decode(COMPARED.read_bytes(), type=Compared)


@cache
def well_known() -> WellKnown:
    return msgspec.json.decode(WELL_KNOWN.read_bytes(), type=WellKnown)


def support(architecture: str, native: bool) -> str:
    """Return what runs an architecture, in one line that continues a model's name. native: whether its code is ours."""
    code = "Manta's native code" if native else "transformers' own code"
    over = "" if native else " over Manta's attention"
    what = compared().of(architecture)
    tested = f"; compared with transformers {compared().transformers}: {what}" if what else ""
    tested = tested or "; no test covers this architecture"
    return f"runs on {code} for {architecture}{over}{tested}{_as_gguf(architecture)}"


def support_by_name(architecture: str, text: str = "") -> str:
    """Return the same line for an architecture without a model's config.json. text: the architecture of its text part,
    if it is multimodal. An architecture in none of our tables is taken to run on transformers' code."""
    if architecture in REFUSED:
        return f"is refused: {UnsupportedArchitecture(architecture, REFUSED[architecture])}"
    computed = text or architecture
    is_foreign = computed in TRANSFORMERS or isinstance(find_family(computed), TransformersFamily)
    return support(computed, native=not is_foreign)


def _as_gguf(architecture: str) -> str:
    tables = [*gguf.FAMILIES.items(), *((name, family) for name, (_, family) in gguf.VARIANTS.items())]
    names = OTHER_GGUF.get(architecture) or [name for name, family in tables if family.architecture == architecture]
    return f"; as GGUF: {', '.join(names)}" if names else ""
