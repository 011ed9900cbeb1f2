"""KV events in vLLM's format, which indexers and routers such as llm-d and Dynamo read.

Decoders of that format ignore unknown keys, and require the keys that have no default here. Field by field after vLLM's
`vllm/distributed/kv_events.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec

BlockHash = bytes | int
"""The 16 bytes of a hash, or its low 64 bits."""


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Consecutive blocks of one sequence have entered the cache."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    """Hash of the block before them; None for the first of a sequence."""
    token_ids: list[int]
    """All tokens of these blocks."""
    block_size: int
    lora_id: int | None
    """Always None: adapters have names."""
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    """What the hash of each block depends on besides its tokens and its parent: the adapter's name, the hash and the
    relative position of each image, and the first block's cache_salt."""
    group_idx: int | None = None
    """KV cache group."""
    kv_cache_spec_kind: str | None = None
    """`full_attention`, `sliding_window` or `mamba`."""
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Blocks have left the cache."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """The cache was reset."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Events of one step."""

    ts: float
    """Unix time in seconds."""
    events: list[KVCacheEvent]
    data_parallel_rank: int = 0
    """Always 0: no engine is part of a data parallel group."""
