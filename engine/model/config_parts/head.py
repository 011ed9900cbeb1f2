"""What a model computes from its hidden states: next tokens, a score, or nothing."""

from __future__ import annotations

from typing import Literal

Head = Literal["lm", "score", "none"]
HEADS: dict[str, Head] = {
    "LMHeadModel": "lm",
    "ForSequenceClassification": "score",
    "ForMaskedLM": "none",
    "TextModel": "none",
    "Model": "none",
}
"""By the end of an architecture's name; `lm` for all others."""
