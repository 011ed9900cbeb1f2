"""The metadata of a GGUF file under its architecture's prefix, and the numbers in it that are read within ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Metadata = Mapping[str, Any]
Fields = dict[str, Any]
COUNT = range(1, 1 << 16)
MAX_LAYERS = 1 << 12
SIZE_OR_NONE = range(1 << 24)  # of a part that a model need not have
# The range of each whole number that is read, by its name behind the architecture's. Others are positive sizes.
RANGES = {
    "block_count": range(1, MAX_LAYERS), "attention.head_count": COUNT, "attention.head_count_kv": COUNT,
    **dict.fromkeys(
        ("attention.sliding_window", "nextn_predict_layers", "expert_count", "expert_used_count", "expert_gating_func",
         "expert_shared_count", "expert_group_count", "expert_group_used_count", "leading_dense_block_count",
         "expert_feed_forward_length", "expert_shared_feed_forward_length", "feed_forward_length",
         "attention.shared_kv_layers", "embedding_length_per_layer_input", "altup.active_idx", "moe_latent_size"),
        SIZE_OR_NONE,
    ),
}  # fmt: skip
SIZE = range(1, 1 << 28)


class GGUFError(Exception):
    """The GGUF file cannot be read as a model; the message says why."""


class Keys:
    """The metadata under the prefix of the file's architecture."""

    def __init__(self, metadata: Metadata):
        self.metadata, self.prefix = metadata, metadata["general.architecture"]

    def get(self, name: str, default: Any = None) -> Any:
        value = self.metadata.get(f"{self.prefix}.{name}", default)
        if isinstance(value, list):  # one for each layer, 0 if the layer has no such part
            scalars = [one for one in value if not isinstance(one, list)]
            values = set(scalars) - {0} if len(value) > 1 else set(scalars)
            if len(values) != 1 or len(scalars) != len(value):
                shown = str(value[:50])[:100]
                raise GGUFError(f"{self.prefix}.{name} = {shown} is not supported: must be the same for all layers")
            return values.pop()
        return value

    def __getitem__(self, name: str) -> Any:
        if (value := self.get(name)) is None:
            raise GGUFError(f"it has no {self.prefix}.{name}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """Return a whole number in its range. Raises GGUFError, also for a missing one without a default."""
        value = self[name] if default is None else self.get(name, default)
        return self._whole(name, value, RANGES.get(name, SIZE))

    def _whole(self, name: str, value: Any, allowed: range) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value not in allowed:
            limit = f"a whole number from {allowed[0]:,} to {allowed[-1]:,}"
            raise GGUFError(f"{self.prefix}.{name} = {str(value)[:100]} is not supported: must be {limit}")
        return value

    def per_layer(self, name: str, default: Any = None) -> list[Any]:
        """Return a value for each layer; the file has a list, or one value for all. Raises GGUFError for a list of
        another length, and for a missing value without a default."""
        value, count = self.metadata.get(f"{self.prefix}.{name}", default), num_layers(self.metadata)
        if value is None:
            raise GGUFError(f"it has no {self.prefix}.{name}")
        if not isinstance(value, list):
            return [value] * count
        if len(value) not in (count, self.size("block_count")):
            raise GGUFError(f"{self.prefix}.{name} must have a value for each of the {count} layers, got {len(value)}")
        return value[:count]

    def sizes(self, name: str, default: int | None = None) -> list[int]:
        """Return a whole number for each layer, from 0 on. Raises GGUFError."""
        return [self._whole(name, value, SIZE_OR_NONE) for value in self.per_layer(name, default)]

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number. Raises GGUFError, also for a missing one without a default."""
        value = self[name] if default is None else self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
            raise GGUFError(f"{self.prefix}.{name} = {str(value)[:100]} is not supported: must be above 0, and finite")
        return value


def num_layers(metadata: Metadata) -> int:
    """Return the number of layers, not counting layers for multi-token prediction."""
    keys = Keys(metadata)
    count, further = keys.size("block_count"), keys.size("nextn_predict_layers", 0)
    if further >= count:
        raise GGUFError(f"{keys.prefix}.nextn_predict_layers = {further} is not supported: must be below {count}")
    return count - further


def head_counts(metadata: Metadata) -> dict[str, int]:
    """Return the numbers of heads of the projections whose rows some families store in pairs."""
    keys = Keys(metadata)
    heads = keys.size("attention.head_count")
    return {"q_proj": heads, "k_proj": keys.size("attention.head_count_kv", heads)}
