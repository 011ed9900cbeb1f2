"""Maps names of a checkpoint's tensors and layers, which depend on how the model was wrapped when it was saved."""

from __future__ import annotations

from typing import ClassVar

# Prefixes of the language model in a multimodal model, as saved by transformers 5 and 4, and of an encoder with a head.
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
# Prefixes of a multimodal model's other parts, which a text model does not read.
OTHERS = (
    "vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "audio_tower.", "embed_vision.",
    "embed_audio.", "connector.", "image_newline", "mm_projector.",
)  # fmt: skip
# Prefixes of what a checkpoint holds besides the base model.
HEADS = ("lm_head.", "score.", "classifier.", "head.", "vision.")
# Mixtral's names -> those of every other family.
RENAMED = {".block_sparse_moe.": ".mlp.", ".w1": ".gate_proj", ".w2": ".down_proj", ".w3": ".up_proj"}


def canonical_name(name: str) -> str:
    """Return the name that a tensor has in a checkpoint of the whole text model. `model.language_model.norm.weight`,
    `language_model.model.norm.weight` and a base model's `norm.weight` all become `model.norm.weight`."""
    wrapper = next((wrapper for wrapper in WRAPPERS if name.startswith(wrapper)), "")
    name = name.removeprefix(wrapper)
    if ".block_sparse_moe." in name:
        for old, new in RENAMED.items():
            name = name.replace(old, new)
    return f"model.{name}" if name.startswith(BARE) else name


def is_of_text(name: str) -> bool:
    """Return whether a tensor belongs to the text part of a checkpoint."""
    return not name.removeprefix("model.").startswith(OTHERS)


class NativeNames:
    """Names of a native model's tensors, which are those of the checkpoint except for merged layers."""

    packed: ClassVar[dict[str, str]] = {}
    embedding_name: ClassVar[str] = "embed_tokens"
    """Name of the embedding in the checkpoint. `final_norm_name` is the name of the last norm."""
    final_norm_name: ClassVar[str] = "norm"

    def checkpoint_name(self, path: str) -> str:
        """Return the canonical name of a tensor from its path in the model: `layers.0.self_attn.qkv_proj.q.weight`
        becomes `model.layers.0.self_attn.q_proj.weight`."""
        for own, original in (("embed_tokens.", f"{self.embedding_name}."), ("norm.", f"{self.final_norm_name}.")):
            if path.startswith(own):
                path = original + path.removeprefix(own)
        for own, original in self.packed.items():
            path = path.replace(f".{own}.", f".{original}.")
        return path if path.startswith(HEADS) else f"model.{path}"

    def canonical_name(self, name: str) -> str | None:
        """Return the canonical name of a checkpoint's tensor; None if it does not belong to the text model."""
        return canonical_name(name) if is_of_text(name) else None
