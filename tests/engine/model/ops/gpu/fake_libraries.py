"""What the attention libraries say of their functions, computed slowly, behind the arguments that they declare
(library_signatures.py); the kernels themselves need a GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.engine.model.ops.gpu.library_signatures import (
    FLASH_ATTENTION_2,
    FLASH_ATTENTION_3,
    FLASH_ATTENTION_4,
    FLASH_INFER,
)


def attend(q: Tensor, pages: tuple[Tensor, Tensor], table: Tensor, length: int, scale: float, window: Any) -> Tensor:
    """q [rows, heads, head_dim] at the end of `length` tokens whose pages [block_size, kv_heads, head_dim] `table`
    names. Row i at position p sees the keys from p - window[0] to p + window[1]; -1 is no bound."""
    if length == 0:
        return q.new_zeros(*q.shape[:2], pages[1].shape[-1])
    k, v = (cache[table.long()].flatten(0, 1)[:length].transpose(0, 1) for cache in pages)
    position = torch.arange(length - len(q), length)[:, None]
    key = torch.arange(length)[None]
    left, right = window
    visible = torch.ones(len(q), length, dtype=torch.bool)
    if left >= 0:
        visible &= key >= position - left
    if right >= 0:
        visible &= key <= position + right
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=visible, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def attend_all(
    q: Tensor, pages: tuple[Tensor, Tensor], starts: Tensor, lengths: Tensor, table: Tensor, scale: float, window: Any
) -> Tensor:
    rows = zip(starts.tolist(), starts.tolist()[1:], lengths.tolist(), table, strict=False)
    return torch.cat([attend(q[a:b], pages, blocks, length, scale, window) for a, b, length, blocks in rows])


def causal_window(causal: bool, window_size: tuple[int, int]) -> tuple[int, int]:
    return (window_size[0], 0) if causal else window_size


def flash_attn_2() -> ModuleType:
    """flash_attn/flash_attn_interface.py: flash_attn_varlen_func, with what csrc/flash_attn/flash_api.cpp checks."""
    module = ModuleType("flash_attn")

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, softmax_scale: float, block_table: Tensor, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:  # fmt: skip
        check(k, v, block_table)
        if k.shape[1] % 256:
            raise RuntimeError("Paged KV cache block size must be divisible by 256")
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert cu_seqlens_q.is_contiguous() and cu_seqlens_k.is_contiguous()
        assert len(cu_seqlens_q) == len(cu_seqlens_k) == len(block_table) + 1
        lengths = cu_seqlens_k.diff()
        assert max_seqlen_q >= max(cu_seqlens_q.diff().tolist()) and max_seqlen_k >= max(lengths.tolist())
        assert max_seqlen_q > 1 or len(q) == len(block_table), "then the heads of a KV head become rows of a sequence"
        window = causal_window(causal, window_size)
        return attend_all(q, (k, v), cu_seqlens_q, lengths, block_table, softmax_scale, window)

    module.flash_attn_varlen_func = FLASH_ATTENTION_2.bound(flash_attn_varlen_func)
    return module


def flash_attn_3() -> ModuleType:
    """hopper/flash_attn_interface.py: flash_attn_with_kvcache."""
    module = ModuleType("flash_attn_interface")

    def flash_attn_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, page_table: Tensor, cu_seqlens_q: Tensor,
        max_seqlen_q: int, softmax_scale: float, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:  # fmt: skip
        check(k_cache, v_cache, page_table)
        assert max_seqlen_q >= max(cu_seqlens_q.diff().tolist()) and cu_seqlens_q.dtype == torch.int32
        window = causal_window(causal, window_size)
        return attend_all(q, (k_cache, v_cache), cu_seqlens_q, cache_seqlens, page_table, softmax_scale, window)

    module.flash_attn_with_kvcache = FLASH_ATTENTION_3.bound(flash_attn_with_kvcache)
    return module


def flash_attn_4() -> ModuleType:
    """flash_attn/cute/interface.py: flash_attn_varlen_func."""
    module = ModuleType("flash_attn.cute")

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor, page_table: Tensor,
        max_seqlen_q: int, softmax_scale: float, causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None), num_splits: int = 1,
    ) -> tuple[Tensor, None]:  # fmt: skip
        check(k, v, page_table)
        left, right = (-1 if side is None else side for side in window_size)
        window = causal_window(causal, (left, right))
        return attend_all(q, (k, v), cu_seqlens_q, seqused_k, page_table, softmax_scale, window), None

    module.flash_attn_varlen_func = FLASH_ATTENTION_4.bound(flash_attn_varlen_func)
    return module


def flash_infer() -> ModuleType:
    """flashinfer/decode.py: trtllm_batch_decode_with_kv_cache. Its kernels take addresses of q, lengths
    and the table without strides (csrc/xqa/xqa_wrapper.cu), and pages with any strides but the last."""
    module = ModuleType("flashinfer.decode")

    def trtllm_batch_decode_with_kv_cache(
        query: Tensor, kv_cache: tuple[Tensor, Tensor], workspace_buffer: Tensor, block_tables: Tensor,
        seq_lens: Tensor, max_seq_len: int, bmm1_scale: float = 1.0, bmm2_scale: float = 1.0, window_left: int = -1,
        out: Tensor | None = None, kv_layout: str = "HND", multi_ctas_kv_counter_buffer: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert multi_ctas_kv_counter_buffer is None or not any(multi_ctas_kv_counter_buffer.tolist())
        assert query.is_contiguous() and block_tables.is_contiguous() and seq_lens.is_contiguous()
        assert len(query) == len(seq_lens) == len(block_tables), "every sequence has one row"
        assert kv_layout == "HND" and isinstance(kv_cache, tuple) and not any(workspace_buffer.tolist())
        lengths = seq_lens.tolist()
        assert min(lengths) > 0 and max(lengths) <= max_seq_len
        pages = tuple(x.transpose(1, 2) for x in kv_cache)
        check(*pages, block_tables)
        starts = torch.arange(len(query) + 1)
        return attend_all(query, pages, starts, seq_lens, block_tables, bmm1_scale, (window_left, 0)) * bmm2_scale

    module.trtllm_batch_decode_with_kv_cache = FLASH_INFER.bound(trtllm_batch_decode_with_kv_cache)
    return module


def check(k: Tensor, v: Tensor, table: Tensor) -> None:
    assert k.stride(-1) == v.stride(-1) == table.stride(-1) == 1
    assert table.dtype == torch.int32
