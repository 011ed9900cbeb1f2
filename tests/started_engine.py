"""Starts an engine and closes it: a process that is forked from one which has imported this finds there what its first
engine would import, its kernels, and the digest of the sources."""

from __future__ import annotations

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.source_digest import numerics_digest

numerics_digest()
for dtype in ("bfloat16", "float32"):
    build_engine(
        EngineConfig(device="cpu", dtype=dtype, num_gpu_blocks_override=8, max_model_len=64, num_threads=1)
    ).close()
