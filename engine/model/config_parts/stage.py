"""The layers of a model that one pipeline stage holds."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

LAYER = re.compile(r"model\.layers\.(\d+)\.")
EMBEDDINGS = ("model.embed_tokens.weight", "model.embeddings.weight")


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers [first, stop) of `num_layers`."""

    first: int
    stop: int
    num_layers: int
    tied: bool
    """Whether the head is tied to the embedding, so that the last stage needs both."""

    @property
    def layers(self) -> range:
        return range(self.first, self.stop)

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.stop == self.num_layers

    @property
    def is_whole(self) -> bool:
        """Whether this one stage has all layers."""
        return self.is_first and self.is_last

    @property
    def has_embedding(self) -> bool:
        return self.is_first or (self.is_last and self.tied)

    def is_elsewhere(self, name: str) -> bool:
        """Return whether a tensor with this canonical name belongs to a layer of another stage."""
        layer = LAYER.match(name)
        return layer is not None and int(layer[1]) in range(self.num_layers) and int(layer[1]) not in self.layers

    def holds(self, name: str) -> bool:
        """Return whether this stage's model has the part of a tensor with this canonical name (tensor_names.py)."""
        if layer := LAYER.match(name):
            return int(layer[1]) in self.layers
        return self.has_embedding if name in EMBEDDINGS else self.is_last


ALL_LAYERS = Stage(0, sys.maxsize, sys.maxsize, tied=False)
"""The only stage of a model without pipeline stages, whatever the number of its layers."""
