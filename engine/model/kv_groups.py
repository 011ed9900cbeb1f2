"""KV cache groups: layers that keep the same of a sequence share one tensor and one block table per sequence.

A model whose layers are alike has one group. Where some have a window and others see all tokens, as in gpt-oss or
Gemma 3, each kind is a group with separate blocks, and one with a window gives back those that no token to come sees.
The idea is that of vLLM's hybrid KV cache manager; there groups share one tensor and one size of blocks in bytes, here
each has its own, over one chain of hashes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """What a layer keeps of each token. Sizes are those of the whole model, not of one rank."""

    num_kv_heads: int
    head_dim: int
    parts: int = 2
    """K and V; 1 for a latent from which both are made."""
    window: int | None = None
    """Newest tokens that are kept; None keeps all. As in ModelConfig.window, a token sees itself and those before it in
    the window."""

    def heads_per_rank(self, tp_size: int = 1) -> int:
        """KV heads that a rank holds; with more ranks than heads, several ranks hold the same one.

        Raises ConfigError when heads and ranks do not divide.
        """
        if self.num_kv_heads % tp_size and tp_size % self.num_kv_heads:
            limit = f"a divisor or a multiple of the model's {self.num_kv_heads} KV heads"
            raise ConfigError("tensor_parallel", tp_size, limit)
        return max(1, self.num_kv_heads // tp_size)

    def first_needed(self, position: int) -> int:
        """The first of the tokens that the one at `position` sees, and with it all tokens after it."""
        return 0 if self.window is None else max(0, position - self.window + 1)


LayerSpecs = tuple[KVCacheSpec | int | None, ...]
"""What each layer keeps: its own KV, that of the layer with this number, which it reads, or none."""


def all_kept(specs: LayerSpecs) -> LayerSpecs:
    """Return the same without windows."""
    return tuple(replace(spec, window=None) if isinstance(spec, KVCacheSpec) else spec for spec in specs)


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers with equal specs, in the order of their places in the group's tensor."""

    spec: KVCacheSpec
    layers: tuple[int, ...]

    def block_shape(self, block_size: int, tp_size: int = 1) -> tuple[int, int, int, int, int]:
        """Return the shape of one block on one rank: [layers, parts, kv_heads, block_size, head_dim]."""
        spec = self.spec
        return len(self.layers), spec.parts, spec.heads_per_rank(tp_size), block_size, spec.head_dim

    def token_numbers(self, tp_size: int = 1) -> int:
        """Numbers that are kept of a token on one rank."""
        layers, parts, heads, _, head_dim = self.block_shape(1, tp_size)
        return layers * parts * heads * head_dim


def group_layers(specs: LayerSpecs) -> tuple[KVCacheGroup, ...]:
    """Return the groups of a model, those that keep all tokens first; none if no layer keeps KV."""
    layers: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        if isinstance(spec, KVCacheSpec):
            layers.setdefault(spec, []).append(layer)
    found = [KVCacheGroup(spec, tuple(own)) for spec, own in layers.items()]
    return tuple(sorted(found, key=lambda group: group.spec.window is not None))


def place_of(layer: int, specs: LayerSpecs) -> tuple[int, int]:
    """Return the group of a layer, and its index there; of a layer that reads another's KV, that one's."""
    spec = specs[layer]
    owner = spec if isinstance(spec, int) else layer
    for number, group in enumerate(group_layers(specs)):
        if owner in group.layers:
            return number, group.layers.index(owner)
    raise ValueError(f"layer {layer} keeps no KV")
