"""Names of a checkpoint's tensors and layers, however the model was wrapped when it was saved."""

from __future__ import annotations

from typing import ClassVar

# The language model of a multimodal one, as transformers 5 and transformers 4 saved it; an encoder with a head.
WRAPPERS = (
    "model.language_model.", "model.text_model.", "language_model.model.", "language_model.", "bert.", "roberta.",
    "backbone.",
)  # fmt: skip
BARE = (
    "layers.",
    "embed_tokens.",
    "norm.",
    "embed_tokens_per_layer.",
    "per_layer_",
    "altup_",
    "embeddings.",
    "encoder.",
    "pooler.",
    "final_norm.",
    "norm_f.",
)
# The other parts of a multimodal model, whose tensors a text model leaves unread.
OTHERS = (
    "vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "audio_tower.", "embed_vision.",
    "embed_audio.", "connector.", "image_newline",
)  # fmt: skip
# next to the base model in a checkpoint
HEADS = ("lm_head.", "score.", "classifier.", "head.", "vision.")
# Mixtral's names, and those that every other family has.
RENAMED = {".block_sparse_moe.": ".mlp.", ".w1": ".gate_proj", ".w2": ".down_proj", ".w3": ".up_proj"}


def canonical_name(name: str) -> str:
    """The name in a checkpoint of the whole text model: `model.language_model.norm.weight`,
    `language_model.model.norm.weight` and a base model's `norm.weight` -> `model.norm.weight`."""
    wrapper = next((wrapper for wrapper in WRAPPERS if name.startswith(wrapper)), "")
    name = name.removeprefix(wrapper)
    if ".block_sparse_moe." in name:
        for old, new in RENAMED.items():
            name = name.replace(old, new)
    return f"model.{name}" if name.startswith(BARE) else name


def is_of_text(name: str) -> bool:
    """Return whether a tensor belongs to the text model of a checkpoint."""
    return not name.removeprefix("model.").startswith(OTHERS)


class NativeNames:
    """Names of a native model's tensors, which are those of the checkpoint except for merged layers."""

    packed: ClassVar[dict[str, str]] = {}
    embedding_name: ClassVar[str] = "embed_tokens"
    """Names in the checkpoint, of the embedding and of the last norm."""
    final_norm_name: ClassVar[str] = "norm"

    def checkpoint_name(self, path: str) -> str:
        """The canonical name of a tensor: `layers.0.self_attn.qkv_proj.q.weight` ->
        `model.layers.0.self_attn.q_proj.weight`."""
        for own, original in (("embed_tokens.", f"{self.embedding_name}."), ("norm.", f"{self.final_norm_name}.")):
            if path.startswith(own):
                path = original + path.removeprefix(own)
        for own, original in self.packed.items():
            path = path.replace(f".{own}.", f".{original}.")
        return path if path.startswith(HEADS) else f"model.{path}"

    def canonical_name(self, name: str) -> str | None:
        """The canonical name of a tensor in the checkpoint; None if it belongs to no text model."""
        return canonical_name(name) if is_of_text(name) else None
