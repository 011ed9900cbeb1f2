"""Architectures in no table: multimodal models, encoders, base models, models with a score head, and what only
transformers' own code computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.errors import UnsupportedArchitecture
from engine.model.checkpoint.fields import Fields
from engine.model.families.encoders import ENCODERS
from engine.model.families.family import HEADS, Family, Head, families
from engine.model.families.multimodal import MULTIMODAL
from engine.model.families.refused import REFUSED
from engine.model.families.transformers_family import TRANSFORMERS_FAMILY, TransformersFamily

IMAGE_ENCODER = TransformersFamily("images.image_encoder.ImageEncoder")
"""A model's vision encoder alone, which an encoding engine has (models/images/image_encoder.py)."""


@dataclass(frozen=True, slots=True)
class HeadedFamily(Family):
    """A family's models with another head, or with none."""

    base: Family = field(kw_only=True)
    head: Head = field(kw_only=True)

    def read(self, architecture: str, raw: Fields, max_model_len: int | None) -> dict[str, Any]:
        return self.base.read(architecture, raw, max_model_len) | {"head": self.head}


def family_of(architecture: str) -> Family:
    """Return the family of an architecture in no table: a family's base model, its variant with a score head, an
    encoder, a multimodal model, or one that only transformers' own code can compute. Raises UnsupportedArchitecture."""
    if architecture == "ImageEncoder":
        return IMAGE_ENCODER
    if architecture in REFUSED:
        raise UnsupportedArchitecture(architecture, REFUSED[architecture])
    if architecture in MULTIMODAL:
        return MULTIMODAL[architecture]
    suffix = next(filter(architecture.endswith, HEADS), "")
    base, head = architecture.removesuffix(suffix), HEADS.get(suffix, "lm")
    family = ENCODERS.get(f"{base}Model", ENCODERS.get(architecture))
    if family is None:
        if head == "lm":
            return TRANSFORMERS_FAMILY
        family = families().get(f"{base}ForCausalLM")
        if family is None or suffix == "ForMaskedLM":
            reason = "embeddings and scores are computed only by native families, and none has this architecture"
            raise UnsupportedArchitecture(architecture, reason)
    return HeadedFamily(family.model, base=family, head=head) if head != "lm" else family
