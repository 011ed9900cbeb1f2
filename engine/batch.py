"""Inputs of one forward pass, as tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Batch:
    """Sequences laid end to end, each with the tokens it computes in this step.

    positions:    [tokens] int64, position of each token in its sequence
    slot_mapping: [tokens] int64, where each token's KV goes: block id * block_size + offset
    query_start:  [seqs + 1] int32, row where each sequence starts; the last one is the number of tokens
    kv_len:       [seqs] int32, tokens of each sequence whose KV exists once this step has written its own
    block_table:  [seqs, max_blocks] int32, block ids in token order; entries past the sequence's end are arbitrary
    kv_cache:     [num_blocks, layers, 2 (K, V), kv_heads, block_size, head_dim]; a block is contiguous over all
                  layers, so that handing it to another pool is one large copy, and a range of heads is contiguous too
    max_query_len, max_kv_len: largest of each over the sequences, known on the host
    """

    positions: Tensor
    slot_mapping: Tensor
    query_start: Tensor
    kv_len: Tensor
    block_table: Tensor
    kv_cache: Tensor
    max_query_len: int
    max_kv_len: int
