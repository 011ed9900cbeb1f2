"""Factors that models trained by maximal update parametrization, arXiv:2203.03466, come with."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.config_parts.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Of what a part of the model takes or gives."""

    embedding: float = 1.0
    residual: float = 1.0
    """Of what a block adds to the residual."""
    logits: float = 1.0
    key: float = 1.0
    attention_in: float = 1.0
    attention_out: float = 1.0
    recurrent_in: float = 1.0
    recurrent_out: float = 1.0
    recurrent_parts: tuple[float, ...] = ()
    """Of the five parts of what Mamba-2's first projection gives."""
    gate: float = 1.0
    """Of an MLP's gate, before its activation."""
    down: float = 1.0

    @classmethod
    def read(cls, raw: Fields) -> Multipliers:
        """raw: fields of config.json, of Granite 4, Falcon-H1 or MiniCPM if it has any."""
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
