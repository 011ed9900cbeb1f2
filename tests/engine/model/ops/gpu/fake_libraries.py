"""What the attention libraries say of their functions, computed slowly, behind the arguments that they declare
(library_signatures.py); the kernels themselves need a GPU."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.engine.model.ops.gpu.library_signatures import (
    FLASH_ATTENTION_3,
    FLASH_ATTENTION_4,
    FLASH_INFER,
    FLASH_INFER_LATENTS,
    FLASH_MLA,
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


def flash_attn_3() -> ModuleType:
    """hopper/flash_attn_interface.py: flash_attn_with_kvcache."""
    module = ModuleType("flash_attn_interface")

    def flash_attn_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, page_table: Tensor, cu_seqlens_q: Tensor,
        max_seqlen_q: int, softmax_scale: float, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
        qv: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        check(k_cache, v_cache, page_table)
        assert max_seqlen_q >= max(cu_seqlens_q.diff().tolist()) and cu_seqlens_q.dtype == torch.int32
        window = causal_window(causal, window_size)
        q, k_cache = with_latents(q, qv, k_cache, v_cache)
        pages = (k_cache, v_cache)
        return attend_all(q, pages, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, window)

    module.flash_attn_with_kvcache = FLASH_ATTENTION_3.bound(flash_attn_with_kvcache)
    return module


def flash_attn_4() -> ModuleType:
    """flash_attn/cute/interface.py: flash_attn_varlen_func."""
    module = ModuleType("flash_attn.cute")

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor, page_table: Tensor,
        max_seqlen_q: int, softmax_scale: float, causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None), num_splits: int = 1, qv: Tensor | None = None,
    ) -> tuple[Tensor, None]:  # fmt: skip
        check(k, v, page_table)
        left, right = (-1 if side is None else side for side in window_size)
        window = causal_window(causal, (left, right))
        q, k = with_latents(q, qv, k, v)
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


def with_latents(q: Tensor, qv: Tensor | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q and k whose product is q @ k + qv @ v: both versions of FlashAttention support `qv` for these sizes only."""
    if qv is None:
        return q, k
    assert q.shape[-1] == k.shape[-1] == 64 and qv.shape[-1] == v.shape[-1] == 512 and qv.shape[:-1] == q.shape[:-1]
    assert k.data_ptr() % 16 == v.data_ptr() % 16 == 0 and qv.stride(-1) == 1, "else the whole cache is copied"
    return torch.cat((qv, q), dim=-1), torch.cat((v, k), dim=-1)


def flash_infer_latents() -> ModuleType:
    """flashinfer/mla/_core.py: trtllm_batch_decode_with_kv_cache_mla, with its checks of shapes."""
    module = ModuleType("flashinfer.mla")

    def trtllm_batch_decode_with_kv_cache_mla(
        query: Tensor, kv_cache: Tensor, workspace_buffer: Tensor, qk_nope_head_dim: int, kv_lora_rank: int,
        qk_rope_head_dim: int, block_tables: Tensor, seq_lens: Tensor, max_seq_len: int, bmm1_scale: float,
        bmm2_scale: float, backend: str, multi_ctas_kv_counter_buffer: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert multi_ctas_kv_counter_buffer is None or not any(multi_ctas_kv_counter_buffer.tolist())
        assert not any(workspace_buffer.tolist()) and query.is_contiguous() and seq_lens.is_contiguous()
        assert query.dtype == torch.bfloat16, "only the default output is allocated, and that is bfloat16"
        seqs, rows, _, width = query.shape
        assert rows == 1 and backend == "trtllm-gen", "it alone takes a table of any width"
        assert (kv_lora_rank, qk_rope_head_dim) in ((512, 64), (256, 64))
        assert width == kv_cache.shape[3] == kv_lora_rank + qk_rope_head_dim and kv_cache.shape[1] == 1
        assert len(block_tables) == len(seq_lens) == seqs and block_tables.is_contiguous()
        assert min(seq_lens.tolist()) > 0 and max(seq_lens.tolist()) <= max_seq_len
        out = attend_latents(query[:, 0], kv_cache.transpose(1, 2), block_tables, seq_lens, bmm1_scale, kv_lora_rank)
        return out[:, None] * bmm2_scale

    module.trtllm_batch_decode_with_kv_cache_mla = FLASH_INFER_LATENTS.bound(trtllm_batch_decode_with_kv_cache_mla)
    return module


def flash_mla() -> ModuleType:
    """flash_mla/flash_mla_interface.py, with what csrc/api/dense_decode.h checks.

    The first call with some metadata divides the keys by `cache_seqlens`; all others must have the same lengths.
    """
    module = ModuleType("flash_mla")

    def flash_mla_with_kvcache(
        q: Tensor, k_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor, head_dim_v: int,
        tile_scheduler_metadata: SimpleNamespace, softmax_scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        seqs, rows, heads, width = q.shape
        assert rows == 1 and width in (576, 512) and head_dim_v == 512, "of the shapes that it computes"
        assert q.dtype == k_cache.dtype and q.dtype in (torch.bfloat16, torch.float16)
        assert k_cache.shape[1:] == (64, 1, width), "page_block_size must be 64"
        assert len(cache_seqlens) == len(block_table) == seqs > 0 and cache_seqlens.is_contiguous()
        assert cache_seqlens.dtype == torch.int32 and q.stride(-1) == 1
        q.view(seqs, rows, 1, heads, width)
        divided = tile_scheduler_metadata.__dict__.setdefault("divided", (q.shape, cache_seqlens.clone()))
        assert divided[0] == q.shape and torch.equal(divided[1], cache_seqlens)
        out = attend_latents(q[:, 0], k_cache, block_table, cache_seqlens, softmax_scale, head_dim_v)
        return out[:, None], torch.zeros(seqs, heads, rows)

    module.flash_mla_with_kvcache = FLASH_MLA.bound(flash_mla_with_kvcache)
    module.get_mla_metadata = lambda *args, **kwargs: (SimpleNamespace(), None)
    return module


def attend_latents(q: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, scale: float, rank: int) -> Tensor:
    """Attend with one row per sequence [seqs, heads, head_dim] to pages [blocks, block_size, 1, head_dim]."""
    check(pages, pages, table)
    return attend_all(q, (pages, pages[..., :rank]), torch.arange(len(q) + 1), lengths, table, scale, (-1, 0))


def check(k: Tensor, v: Tensor, table: Tensor) -> None:
    assert k.stride(-1) == v.stride(-1) == table.stride(-1) == 1
    assert table.dtype == torch.int32
