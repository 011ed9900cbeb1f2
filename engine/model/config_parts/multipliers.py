"""Reads the factors of models trained with maximal update parametrization, arXiv:2203.03466."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.checkpoint.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Factors on inputs or outputs of parts of a model."""

    embedding: float = 1.0
    residual: float = 1.0
    """On the output of a block, before it is added to the residual."""
    logits: float = 1.0
    key: float = 1.0
    attention_in: float = 1.0
    attention_out: float = 1.0
    recurrent_in: float = 1.0
    recurrent_out: float = 1.0
    recurrent_parts: tuple[float, ...] = ()
    """On the five outputs of Mamba-2's `in_proj`."""
    gate: float = 1.0
    """On an MLP's gate, before its activation."""
    down: float = 1.0

    @classmethod
    def read(cls, raw: Fields) -> Multipliers:
        """Return the factors of Granite 4, Falcon-H1 or MiniCPM; all 1 for other models. raw: fields of config.json."""
        if "scale_emb" in raw:  # MiniCPM
            layers, hidden = raw["num_hidden_layers"], raw["hidden_size"]
            return cls(
                embedding=raw["scale_emb"],
                residual=(raw.get("scale_depth") or layers**0.5) / layers**0.5,
                logits=(raw.get("dim_model_base") or hidden) / hidden,
            )
        gate, down = raw.get("mlp_multipliers") or (1.0, 1.0)
        return cls(
            embedding=raw.get("embedding_multiplier", 1.0),
            residual=raw.get("residual_multiplier", 1.0),
            logits=raw.get("lm_head_multiplier", 1.0) / raw.get("logits_scaling", 1.0),
            key=raw.get("key_multiplier", 1.0),
            attention_in=raw.get("attention_in_multiplier", 1.0),
            attention_out=raw.get("attention_out_multiplier", 1.0),
            recurrent_in=raw.get("ssm_in_multiplier", 1.0),
            recurrent_out=raw.get("ssm_out_multiplier", 1.0),
            recurrent_parts=tuple(raw.get("ssm_multipliers") or ()),
            gate=gate,
            down=down,
        )
