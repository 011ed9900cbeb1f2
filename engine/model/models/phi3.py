"""Phi 3 and 4, arXiv:2404.14219 and arXiv:2412.08905: Llama whose checkpoints hold q, k and v in one tensor, and gate
and up in another."""

from __future__ import annotations

from typing import ClassVar

from engine.model.models.llama import PACKED, LlamaForCausalLM


class Phi3ForCausalLM(LlamaForCausalLM):
    packed: ClassVar[dict[str, str]] = {own: own.partition(".")[0] for own in PACKED}
