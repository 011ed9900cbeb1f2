"""Encoders: BERT, arXiv:1810.04805, and its successors."""

from __future__ import annotations

from engine.model.families.family import Family
from engine.model.families.wide_family import WideFamily

GELU = ("gelu",)
# The base models of encoders; each also exists with a head for pretraining, and with a score head.
BERT_FIELDS = {"hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12}
BERT = WideFamily("bert.BertModel", (), {**BERT_FIELDS, "first_position": 0}, encoder=True, activations=GELU)
ROBERTA = WideFamily("bert.RobertaModel", (), {**BERT_FIELDS, "pad_token_id": 1}, encoder=True, activations=GELU)
ENCODERS: dict[str, Family] = {
    "BertModel": BERT,
    "RobertaModel": ROBERTA,
    "XLMRobertaModel": ROBERTA,
    "ModernBertModel": WideFamily(
        "modernbert.ModernBertModel",
        ("attention_bias", "mlp_bias", "hidden_activation", "layer_types"),
        {
            "hidden_activation": "gelu", "max_position_embeddings": 8192, "local_attention": 128, "norm_eps": 1e-5,
            "global_attn_every_n_layers": 3, "global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0,
        },
        encoder=True,
        activations=GELU,
    ),
}  # fmt: skip
