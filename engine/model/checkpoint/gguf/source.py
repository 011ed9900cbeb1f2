"""What a GGUF file says about its model: its metadata, its tensors, and its rotary factors."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.model.checkpoint.gguf.entry import Entry
from engine.model.checkpoint.gguf.keys import GGUFError, Keys, Metadata


@dataclass(frozen=True, slots=True)
class GGUFSource:
    """The file from which the fields of config.json are read."""

    metadata: Metadata
    tensors: dict[str, Entry]
    """By their names in the file."""
    factors: dict[str, list[float]] = field(default_factory=dict)
    """Tensors of rotary factors, by name."""

    @property
    def keys(self) -> Keys:
        return Keys(self.metadata)

    @property
    def parts(self) -> set[str]:
        """The names of the tensors that layers have, without the number of the layer."""
        return set(map(_part, self.tensors)) - {""}

    def shape(self, part: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the first layer that has it. Raises GGUFError if none has it."""
        for name, entry in self.tensors.items():
            if _part(name) == part:
                return entry.shape
        raise GGUFError(f"it has no tensor {part}")


def _part(name: str) -> str:
    """Return the name of a layer's tensor without the number of the layer; empty for another tensor."""
    block, _, rest = name.partition(".")
    return rest.partition(".")[2] if block == "blk" else ""
