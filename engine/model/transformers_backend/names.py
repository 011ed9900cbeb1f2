"""Maps names of a checkpoint's tensors, which transformers renames as it loads a model (its conversion_mapping.py)."""

from __future__ import annotations

import re
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightRenaming

from engine.model.tensor_names import BARE, WRAPPERS

PIECES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",), "up_proj": ("up_proj",)}
NUMBER = re.compile(r"\.\d+(?=\.|$)")


class CheckpointNames:
    """Maps a checkpoint's names to those of the model: `model.layers.0.block_sparse_moe.experts.3.w1.weight` ->
    `model.layers.0.mlp.experts.3.gate_proj.weight`.

    transformers holds the weights of all experts in one parameter; here its parts are named as in most checkpoints.
    """

    def __init__(self, model: Any, parameters: set[str]):
        """parameters: names in transformers' model."""
        embedding = model.get_input_embeddings()
        self.prefix = next(path for path, module in model.named_modules() if module is embedding).partition(".")[0]
        """Name of the model without its head."""
        self._renamings, self._merges, self._others = [], [], []
        self._merged: set[str] = set()
        self._ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
        for conversion in get_model_conversion_mapping(model):
            if isinstance(conversion, WeightRenaming):
                self._renamings.append(conversion)
                continue
            operations = conversion.operations
            target = conversion.target_patterns[0].replace("\\", "")
            head, _, own = target.rpartition(".")
            sources = [source.replace("\\", "") for source in conversion.source_patterns]
            merges = isinstance(operations[0], MergeModulelist) and own in PIECES
            if merges and all(isinstance(o, Concatenate) for o in operations[1:]) and len(sources) == len(PIECES[own]):
                self._merged.add(target)
                for source, piece in zip(sources, PIECES[own], strict=True):
                    source = source.removesuffix("$").removesuffix(".weight")
                    pattern = re.compile(re.escape(source).replace(r"\*", r"(\d+)") + r"(?=\.)")
                    self._merges.append((pattern, lambda m, h=head, p=piece: f"{h}.{m[1]}.{p}"))
            else:
                self._others.append(conversion)
        names = [NUMBER.sub(".*", name) for name in parameters]
        self.refused = {
            type(operation).__name__
            for other in self._others
            for target in other.target_patterns
            if any(re.search(target.replace(r"\1", ".*"), name) for name in names)
            for operation in other.operations
        }
        """Names of the operations that this checkpoint needs and that are not supported here."""
        self._parameters = parameters

    def is_merged(self, parameter: str) -> bool:
        """Return whether the checkpoint stores a parameter as one tensor for each index of its first dimension."""
        return any(parameter.endswith(target) for target in self._merged)

    def __call__(self, original: str) -> str | None:
        """Return the name in the model; None for a tensor that transformers does not read."""
        name = self._renamed(original)
        ignored = name not in self._parameters and any(pattern.search(original) for pattern in self._ignored)
        return None if ignored else name

    def _renamed(self, name: str) -> str:
        if self.prefix == "model":  # as in canonical_name, whose own renamings are for native families
            name = name.removeprefix(next((wrapper for wrapper in WRAPPERS if name.startswith(wrapper)), ""))
            name = f"model.{name}" if name.startswith(BARE) else name
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        for pattern, replacement in self._merges:
            name = pattern.sub(replacement, name)
        whole = f"{self.prefix}.{name}"
        return whole if name not in self._parameters and whole in self._parameters else name
