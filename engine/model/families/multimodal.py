"""Multimodal models: the families of their text parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.model.checkpoint.fields import Fields
from engine.model.families.family import Family
from engine.model.families.transformers_family import TRANSFORMERS_FAMILY

# For each, the architecture by the model_type of its text part, and fields that differ from the family's. Nothing but
# the text part is read.
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
TEXT_PARTS: dict[str, tuple[dict[str, str], dict[str, bool]]] = {
    "EmbeddingGemma2Model": ({"embedding_gemma2_text": "EmbeddingGemma2TextModel"}, TIED),
    "Gemma3ForConditionalGeneration": ({"gemma3_text": "Gemma3ForCausalLM"}, TIED),
    "Gemma3nForConditionalGeneration": ({"gemma3n_text": "Gemma3nForCausalLM"}, TIED),
    "Gemma4ForConditionalGeneration": ({"gemma4_text": "Gemma4ForCausalLM"}, TIED),
    "Gemma4UnifiedForConditionalGeneration": ({"gemma4_unified_text": "Gemma4UnifiedForCausalLM"}, TIED),
    "Idefics3ForConditionalGeneration": ({"llama": "LlamaForCausalLM"}, UNTIED),
    "InternVLForConditionalGeneration": (
        {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}, TIED
    ),
    # Kimi K2.5 and K2.6, as their authors and as transformers name them
    **dict.fromkeys(
        ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        ({"deepseek_v3": "DeepseekV3ForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM"}, TIED),
    ),
    "LlavaNextForConditionalGeneration": (
        {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}, UNTIED
    ),
    "Mistral3ForConditionalGeneration": ({"mistral": "MistralForCausalLM"}, TIED),
    "Qwen2VLForConditionalGeneration": ({"qwen2_vl_text": "Qwen2ForCausalLM"}, UNTIED),
    "Qwen2_5_VLForConditionalGeneration": ({"qwen2_5_vl_text": "Qwen2ForCausalLM"}, UNTIED),
    "Qwen3VLForConditionalGeneration": ({"qwen3_vl_text": "Qwen3ForCausalLM"}, UNTIED),
    "Qwen3VLMoeForConditionalGeneration": (
        {"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"}, {**UNTIED, "norm_topk_prob": True, "use_sliding_window": False}
    ),
    "Qwen3_5ForConditionalGeneration": ({"qwen3_5_text": "Qwen3_5ForCausalLM"}, UNTIED),
    "Qwen3_5MoeForConditionalGeneration": ({"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}, UNTIED),
    "SmolVLMForConditionalGeneration": ({"llama": "LlamaForCausalLM"}, UNTIED),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MultimodalFamily(Family):
    """A model of which the text part is read. If its text part has no family, transformers' own code computes it."""

    texts: dict[str, str] = field(kw_only=True)
    """The architecture of the text part by its model_type."""
    differing: dict[str, bool] = field(kw_only=True)
    """Fields that differ from those of the text part's family."""

    def text_part(self, architecture: str, whole: Fields) -> tuple[str, Fields]:
        """Return the architecture and the fields of the text part. For text, the parts of a multimodal position
        (`mrope`) are all equal, so the ordinary rotary embedding is used."""
        # older files of Qwen2.5-VL have the text part's fields at the top level
        own = whole.get("text_config") or {"model_type": next(iter(self.texts))}
        if (family := self.texts.get(own.get("model_type", ""))) is None:
            return architecture, whole
        tied = whole.get("tie_word_embeddings", self.differing["tie_word_embeddings"])
        text = Fields({**whole, **own}) | self.differing | {"tie_word_embeddings": tied}
        for key in ("rope_scaling", "rope_parameters"):
            if (text.get(key) or {}).get("mrope_section"):
                rope = {name: value for name, value in text[key].items() if not name.startswith("mrope")}
                text[key] = rope | {name: "default" for name in ("type", "rope_type") if rope.get(name) == "mrope"}
        return family, text

    def read(self, architecture: str, raw: Fields, max_model_len: int | None) -> dict[str, Any]:
        return TRANSFORMERS_FAMILY.read(architecture, raw, max_model_len)


MULTIMODAL: dict[str, Family] = {
    name: MultimodalFamily(TRANSFORMERS_FAMILY.model, texts=texts, differing=differing)
    for name, (texts, differing) in TEXT_PARTS.items()
}
