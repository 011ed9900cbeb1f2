"""KV cache groups: layers that keep the same KV of a sequence share one tensor and one block table per sequence.

A model whose layers are alike has one group. If some layers have a window and others see all tokens, as in gpt-oss or
Gemma 3, each kind is a group with its own blocks, and a group with a window frees the blocks that no future token sees.
vLLM's hybrid KV cache manager has the same idea. In vLLM, groups share one tensor, and their blocks have the same size
in bytes. In Manta, each group has its own tensor and block size, and all groups share one chain of hashes.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """The KV that a layer keeps for each token. Sizes are those of the whole model, not of one rank."""

    num_kv_heads: int
    head_dim: int
    parts: int = 2
    """2 for K and V; 1 for a latent from which both are made."""
    window: int | None = None
    """Number of newest tokens whose KV is kept; None keeps all. It includes the token itself, as in ModelConfig."""

    def heads_per_rank(self, tp_size: int = 1) -> int:
        """Return the number of KV heads on a rank. With more ranks than heads, several ranks hold the same head.

        Raises ConfigError if neither number divides the other.
        """
        if self.num_kv_heads % tp_size and tp_size % self.num_kv_heads:
            limit = f"a divisor or a multiple of the model's {self.num_kv_heads} KV heads"
            raise ConfigError("tensor_parallel_size", tp_size, limit)
        return max(1, self.num_kv_heads // tp_size)

    def first_needed(self, position: int) -> int:
        """Return the position of the first token whose KV is needed by the token at `position` or any later one."""
        return 0 if self.window is None else max(0, position - self.window + 1)


LayerSpecs = tuple[KVCacheSpec | int | None, ...]
"""For each layer: the spec of its own KV, the number of the layer whose KV it reads, or None if it needs no KV."""


def all_kept(specs: LayerSpecs) -> LayerSpecs:
    """Return the specs without windows."""
    return tuple(replace(spec, window=None) if isinstance(spec, KVCacheSpec) else spec for spec in specs)


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers with equal specs, in the order in which the group's tensor holds them."""

    spec: KVCacheSpec
    layers: tuple[int, ...]

    def block_shape(self, block_size: int, tp_size: int = 1) -> tuple[int, int, int, int, int]:
        """Return the shape of one block on one rank: [layers, parts, kv_heads, block_size, head_dim]."""
        spec = self.spec
        return len(self.layers), spec.parts, spec.heads_per_rank(tp_size), block_size, spec.head_dim

    def part(self, layers: Container[int]) -> KVCacheGroup:
        """Return the group with only those of its layers that are in `layers`, possibly none."""
        return replace(self, layers=tuple(layer for layer in self.layers if layer in layers))

    def token_numbers(self, tp_size: int = 1) -> int:
        """Return how many numbers one rank keeps for a token."""
        layers, parts, heads, _, head_dim = self.block_shape(1, tp_size)
        return layers * parts * heads * head_dim


def group_layers(specs: LayerSpecs) -> tuple[KVCacheGroup, ...]:
    """Return the groups of a model, those without a window first; empty if no layer keeps KV."""
    layers: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        if isinstance(spec, KVCacheSpec):
            layers.setdefault(spec, []).append(layer)
    found = [KVCacheGroup(spec, tuple(own)) for spec, own in layers.items()]
    return tuple(sorted(found, key=lambda group: group.spec.window is not None))


def place_of(layer: int, specs: LayerSpecs, groups: Sequence[KVCacheGroup]) -> tuple[int, int]:
    """Return the group that holds a layer's KV, and the layer's index in the group. For a layer that reads another
    layer's KV, return the group and index of that other layer. groups: of all layers, or of one stage."""
    spec = specs[layer]
    owner = spec if isinstance(spec, int) else layer
    for number, group in enumerate(groups):
        if owner in group.layers:
            return number, group.layers.index(owner)
    raise ValueError(f"layer {layer} keeps no KV")
