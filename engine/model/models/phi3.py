"""Phi 3 and 4, arXiv:2404.14219, arXiv:2412.08905: Llama whose checkpoints merge q, k and v, and gate and up."""

from __future__ import annotations

from typing import ClassVar

from engine.model.models.llama import PACKED, LlamaForCausalLM


class Phi3ForCausalLM(LlamaForCausalLM):
    packed: ClassVar[dict[str, str]] = {own: own.partition(".")[0] for own in PACKED}
