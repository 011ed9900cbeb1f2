"""Families that differ from Llama by few options."""

from __future__ import annotations

from engine.model.families.family import QWEN_WINDOW, Family

FAMILIES: dict[str, Family] = {
    # Mistral, arXiv:2310.06825: Llama with a sliding attention window in all layers
    "MistralForCausalLM": Family(
        "llama.LlamaForCausalLM", ("sliding_window",), {"sliding_window": 4096, "eos_token_id": 2}
    ),
    # Qwen 2 and 2.5, arXiv:2407.10671: Llama with biases on Q, K and V
    "Qwen2ForCausalLM": Family(
        "llama.LlamaForCausalLM",
        QWEN_WINDOW,
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "qkv_bias": True},
    ),
    # Phi 3 and 4: Llama with merged projections, parts of heads rotated, and `longrope`
    "Phi3ForCausalLM": Family(
        "phi3.Phi3ForCausalLM",
        ("sliding_window", "partial_rotary_factor"),
        {"partial_rotary_factor": 1.0, "eos_token_id": 32_000},
    ),
}  # fmt: skip
