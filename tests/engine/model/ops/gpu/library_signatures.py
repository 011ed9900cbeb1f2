"""What the packages that only a GPU can run declare, recorded from their source; every call of ours is bound to it.

    python -m tests.engine.model.ops.gpu.library_signatures FILE...

compares the records with wheels (`pip download --no-deps flashinfer-python flash-attn-4`) or with single source files.
"""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Declaration:
    name: str
    package: str
    version: str
    file: str
    line: int | None
    arguments: str  #: without annotations

    @property
    def signature(self) -> inspect.Signature:
        return inspect.signature(eval(f"lambda {self.arguments}: None"))

    def bound(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Return `compute`, which may know fewer arguments, behind this signature."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return compute(**self.signature.bind(*args, **kwargs).arguments)

        return call


FLASH_INFER = Declaration(
    "trtllm_batch_decode_with_kv_cache", "flashinfer-python", "0.7.2.post1", "flashinfer/decode.py", 3710,
    "query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0, "
    "window_left=-1, out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None, sinks=None, kv_layout='HND', "
    "enable_pdl=None, backend='auto', q_len_per_req=1, o_scale=1.0, mask=None, max_q_len=None, cum_seq_lens_q=None, "
    "skip_softmax_threshold_scale_factor=None, kv_cache_sf=None, uses_shared_paged_kv_idx=True, lse=None, "
    "return_lse=False, bmm1_scale_log2=None, multi_ctas_kv_counter_buffer=None, enable_block_sparse_attention=False, "
    "cp_world=1, cp_rank=0, causal_seqlens_kv_global=None, bf16q_fp8kv_transform_mode=None, request_order=None, "
    "request_order_plan=None",
)  # fmt: skip
FLASH_ATTENTION_2 = Declaration(
    "flash_attn_varlen_func", "flash-attn", "2.8.3", "flash_attn/flash_attn_interface.py", None,
    "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, "
    "block_table=None",
)  # fmt: skip
FLASH_ATTENTION_4 = Declaration(
    "flash_attn_varlen_func", "flash-attn-4", "4.0.0b36", "flash_attn/cute/interface.py", 4214,
    "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, "
    "seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False, "
    "window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
    "score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, "
    "return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False, "
    "gather_bwd_recompute_p=False, gather_bwd_token_chunk=None",
)  # fmt: skip
FLASH_ATTENTION_3 = Declaration(  # on no package index: built from the repository
    "flash_attn_with_kvcache", "Dao-AILab/flash-attention", "01afd16", "hopper/flash_attn_interface.py", None,
    "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
    "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
    "max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, "
    "causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
    "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False",
)  # fmt: skip
DECLARATIONS = (FLASH_INFER, FLASH_ATTENTION_2, FLASH_ATTENTION_4, FLASH_ATTENTION_3)


@functools.cache
def parsed(source: str) -> ast.Module:
    """The tree of a source, built with the collector off.

    A collection in the middle of building a large tree runs finalizers, and these let other threads run. One that
    parses too then makes CPython 3.11 raise "AST constructor recursion depth mismatch": both share one counter.
    """
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        gc.enable()


def declared(source: str, name: str) -> list[tuple[int, str]]:
    """Line and arguments, without annotations, of every function of this name; a method's is `Class.method`."""
    owner, _, function = name.rpartition(".")
    found = []
    for scope in ast.walk(parsed(source)):
        if isinstance(scope, ast.ClassDef if owner else ast.Module) and getattr(scope, "name", "") == owner:
            for node in scope.body:
                if isinstance(node, ast.FunctionDef) and node.name == function:
                    for argument in ast.walk(node.args):
                        if isinstance(argument, ast.arg):
                            argument.annotation = None
                    found.append((node.lineno, ast.unparse(node.args)))
    return found


def compare(declaration: Declaration, source: str, where: str) -> bool:
    found = declared(source, declaration.name)
    same = [line for line, arguments in found if arguments == declaration.arguments]
    print(f"{declaration.name}: {'as in' if same else 'NOT as in'} {where}, lines {same or found}")
    return bool(same)


def main(paths: list[Path]) -> int:
    same = []
    for path in paths:
        for declaration in DECLARATIONS:
            if path.suffix == ".whl":
                with zipfile.ZipFile(path) as wheel:
                    if declaration.file in wheel.namelist():
                        source = wheel.read(declaration.file).decode()
                        same.append(compare(declaration, source, f"{path.name}/{declaration.file}"))
            elif declaration.file.endswith(path.name):
                same.append(compare(declaration, path.read_text(encoding="utf-8"), str(path)))
    return 0 if same and all(same) else 1


if __name__ == "__main__":
    sys.exit(main([Path(path) for path in sys.argv[1:]]))
