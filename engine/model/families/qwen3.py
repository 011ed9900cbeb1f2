"""Qwen 3, arXiv:2505.09388."""

from __future__ import annotations

from engine.model.families.family import Family

QWEN_WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

FAMILIES: dict[str, Family] = {
    "Qwen3ForCausalLM": Family(
        "qwen3.Qwen3ForCausalLM",
        (*QWEN_WINDOW, "attention_bias"),
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    ),
}  # fmt: skip
