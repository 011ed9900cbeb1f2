"""Encoders: BERT, arXiv:1810.04805, and its successors, and EmbeddingGemma 2."""

from __future__ import annotations

from engine.model.families.family import Family
from engine.model.families.gemma import GEMMA4, GEMMA_KEYS
from engine.model.families.wide_family import WideFamily

GELU = ("gelu",)
# The base models of encoders; each also exists with a head for pretraining, and with a score head.
BERT_FIELDS = {"hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12}
BERT = WideFamily("encoders.bert.BertModel", (), {**BERT_FIELDS, "first_position": 0}, encoder=True, activations=GELU)
ROBERTA = WideFamily(
    "encoders.bert.RobertaModel", (), {**BERT_FIELDS, "pad_token_id": 1}, encoder=True, activations=GELU
)
ENCODERS: dict[str, Family] = {
    "BertModel": BERT,
    "RobertaModel": ROBERTA,
    "XLMRobertaModel": ROBERTA,
    # EmbeddingGemma 2, text: Gemma 4 in both directions, with layer embeddings that are projected
    "EmbeddingGemma2TextModel": WideFamily(
        "encoders.embedding_gemma2.EmbeddingGemma2Model",
        GEMMA_KEYS,
        GEMMA4 | {
            "use_bidirectional_attention": True, "num_attention_heads": 4, "num_key_value_heads": 2,
            "num_global_key_value_heads": 1, "max_position_embeddings": 262_144, "hidden_size_per_layer_input": 512,
            "vocab_size_per_layer_input": 0, "embedding_dim": 768,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            },
        },
    ),
    "ModernBertModel": WideFamily(
        "encoders.modernbert.ModernBertModel",
        ("attention_bias", "mlp_bias", "hidden_activation", "layer_types"),
        {
            "hidden_activation": "gelu", "max_position_embeddings": 8192, "local_attention": 128, "norm_eps": 1e-5,
            "global_attn_every_n_layers": 3, "global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0,
        },
        encoder=True,
        activations=GELU,
    ),
}  # fmt: skip
