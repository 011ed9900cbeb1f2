"""Models that transformers' own code computes over Manta's attention (engine/model/transformers_backend)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.model.checkpoint.fields import Fields
from engine.model.families.family import Family

# Architectures that transformers' own code computes in tests/engine/model/transformers_backend, with models that have
# them. Others that transformers knows may run as well.
TRANSFORMERS: dict[str, str] = {
    "AfmoeForCausalLM": "Trinity",
    "ApertusForCausalLM": "Apertus",
    "ArceeForCausalLM": "AFM-4.5B",
    "CohereForCausalLM": "Command R, Aya 23",
    "Cohere2ForCausalLM": "Command R7B, Command A",
    "CwmForCausalLM": "CWM",
    "Dots1ForCausalLM": "dots.llm1",
    "Ernie4_5ForCausalLM": "ERNIE 4.5 0.3B",
    "Ernie4_5_MoeForCausalLM": "ERNIE 4.5 21B-A3B, 300B-A47B",
    "Exaone4ForCausalLM": "EXAONE 4",
    "ExaoneMoeForCausalLM": "K-EXAONE",
    "FlexOlmoForCausalLM": "FlexOlmo",
    "GPT2LMHeadModel": "GPT-2",
    "GPTBigCodeForCausalLM": "StarCoder, SantaCoder",
    "GPTNeoXForCausalLM": "Pythia, GPT-NeoX",
    "GemmaForCausalLM": "Gemma",
    "Glm4ForCausalLM": "GLM-4-0414",
    "GlmForCausalLM": "GLM-4-9B, GLM-Edge",
    "GraniteForCausalLM": "Granite 3",
    "GraniteMoeForCausalLM": "Granite 3 MoE",
    "GraniteMoeSharedForCausalLM": "Granite MoE with shared experts",
    "HeliumForCausalLM": "Helium",
    "HunYuanDenseV1ForCausalLM": "Hunyuan 0.5B to 7B",
    "HunYuanMoEV1ForCausalLM": "Hunyuan-A13B",
    "HyperCLOVAXForCausalLM": "HyperCLOVA X SEED",
    "Jais2ForCausalLM": "Jais 2",
    "Llama4ForCausalLM": "Llama 4, text",
    "Llama4ForConditionalGeneration": "Llama 4, text part",
    "MellumForCausalLM": "Mellum",
    "MiniMaxM2ForCausalLM": "MiniMax M2",
    "Ministral3ForCausalLM": "Ministral 3, text",
    "MinistralForCausalLM": "Ministral 8B",
    "Mistral3ForConditionalGeneration": "Ministral 3, text part",
    "ModernBertDecoderForCausalLM": "Ettin decoders",
    "NanoChatForCausalLM": "nanochat",
    "NemotronForCausalLM": "Nemotron-4, Minitron",
    "OPTForCausalLM": "OPT",
    "Olmo2ForCausalLM": "OLMo 2",
    "Olmo3ForCausalLM": "OLMo 3",
    "OlmoForCausalLM": "OLMo",
    "OlmoeForCausalLM": "OLMoE",
    "PersimmonForCausalLM": "Persimmon",
    "PhiForCausalLM": "Phi-1.5, Phi-2",
    "PhimoeForCausalLM": "Phi-3.5-MoE",
    "SeedOssForCausalLM": "Seed-OSS",
    "SmolLM3ForCausalLM": "SmolLM3",
    "SolarOpenForCausalLM": "Solar Open",
    "Starcoder2ForCausalLM": "StarCoder2",
    "VaultGemmaForCausalLM": "VaultGemma",
}
# The architectures in TRANSFORMERS for which transformers has no tensor-parallel plan.
ONE_RANK = frozenset({
    "GPT2LMHeadModel", "GPTBigCodeForCausalLM", "ModernBertDecoderForCausalLM", "OPTForCausalLM",
    "PersimmonForCausalLM",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class TransformersFamily(Family):
    """Any architecture that transformers knows and that no table has."""

    def read(self, architecture: str, raw: Fields, max_model_len: int | None) -> dict[str, Any]:
        from engine.model.auto_config import read  # transformers takes seconds to import

        fields = read(raw, max_model_len)
        return fields | {
            "attention_scale": fields["head_dim"] ** -0.5,
            "rms_norm_eps": 0.0,
            "rope": (),
            "qkv_bias": False,
            "output_bias": False,
            "mlp_bias": False,
        }


TRANSFORMERS_FAMILY = TransformersFamily(".transformers_backend.model.TransformersModel")
