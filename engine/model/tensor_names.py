"""Names of a checkpoint's tensors and layers, however the model was wrapped when it was saved."""

from __future__ import annotations

# The language model of a multimodal one, as transformers 5 and transformers 4 saved it; an encoder with a head.
WRAPPERS = ("model.language_model.", "language_model.model.", "language_model.", "bert.", "roberta.")
BARE = ("layers.", "embed_tokens.", "norm.", "embeddings.", "encoder.", "pooler.", "final_norm.")


def canonical_name(name: str) -> str:
    """The name in a checkpoint of the whole text model: `model.language_model.norm.weight`,
    `language_model.model.norm.weight` and a base model's `norm.weight` -> `model.norm.weight`."""
    wrapper = next((wrapper for wrapper in WRAPPERS if name.startswith(wrapper)), "")
    name = name.removeprefix(wrapper)
    return f"model.{name}" if name.startswith(BARE) else name
