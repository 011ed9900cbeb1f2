"""Identity of a model, so that a text begun by one model is never continued by another."""

from __future__ import annotations

import msgspec


class ModelIdentity(msgspec.Struct, frozen=True):
    """Digests that tell apart models, and versions of one model."""

    weights: str
    """Digest of config.json and the weights."""
    vocabulary: str
    """Digest of the meaning of each token id; empty for a model without a tokenizer. Engines with the same vocabulary
    understand each other's prompts, whatever their weights."""
