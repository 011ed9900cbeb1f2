"""Architectures that transformers computes and Manta does not, with what is missing."""

from __future__ import annotations

REFUSED: dict[str, str] = {
    "BailingHybridForCausalLM": "the decays of its linear attention have a lower bound, for which there is no kernel",
    "DeepseekV4ForCausalLM": "there is no code for attention to compressed tokens, nor for hyper-connections",
    "Glm5NextForConditionalGeneration": "there is no code for hyper-connections, nor for its linear attention",
    "MiniMaxM3SparseForConditionalGeneration": "there is no code for attention to selected blocks of keys",
    "Step3p7ForConditionalGeneration": "transformers has no causal language model for its text part",
}
