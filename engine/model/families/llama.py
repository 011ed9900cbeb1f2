"""Llama 2 and 3: arXiv:2307.09288, arXiv:2407.21783."""

from __future__ import annotations

from engine.model.families.family import Family

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama.LlamaForCausalLM", ("attention_bias", "mlp_bias"), {"eos_token_id": 2}),
}  # fmt: skip
