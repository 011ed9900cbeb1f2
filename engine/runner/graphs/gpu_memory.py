"""Measures how much memory of a GPU is free for what a rank keeps of sequences."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from engine.devices.free_memory import FreeMemory
from engine.engine_options import EngineOptions
from engine.options.kernels import KernelOptions
from engine.runner.rank_setup import RankSetup

logger = logging.getLogger(__name__)

CUBLAS_BYTES = 32 << 20  # most workspace of a thread that multiplies matrices (ATen's CublasHandlePool.cpp)


def free_gpu_memory(setup: RankSetup, run_dummy_step: Callable[[int, int], None]) -> FreeMemory:
    """Return the memory that `gpu_memory_utilization` leaves for the KV cache and snapshots. Runs the largest step to
    measure its activations; subtracts these, weights, graphs, token history and block tables. run_dummy_step: computes
    a step of (tokens, sequences)."""
    config = setup.config.of(KernelOptions)

    def run_largest() -> None:
        run_dummy_step(config.max_num_batched_tokens, config.max_num_seqs)

    run_largest()  # compiles kernels and loads libraries, whose memory stays in use
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_largest()
    torch.cuda.synchronize()
    activations = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    used = total - free
    graphs = 0 if config.enforce_eager else int(config.cuda_graph_memory_gib * 2**30)
    longest = setup.model.longest_sequence(config.max_model_len)
    tables = len(setup.model.kv_groups) * -(-longest // setup.block_size)
    sequences = 4 * config.max_num_seqs * (longest + tables)  # token history and block tables, int32
    threads = CUBLAS_BYTES * (setup.tp.size > 1)  # with other ranks, EngineCore launches steps in another thread
    logger.info(
        "profiled the largest step: %.2f GiB above %.2f GiB in use; %.2f GiB are kept for graphs, %.2f for tokens "
        "and block tables",
        activations / 2**30, used / 2**30, graphs / 2**30, sequences / 2**30,
    )  # fmt: skip
    return usable_gpu_memory(total, config).less(used + activations + graphs + sequences + threads)


def usable_gpu_memory(total: int, config: EngineOptions) -> FreeMemory:
    """Return the part of a GPU's memory that an engine may use."""
    utilization = config.gpu_memory_utilization
    return FreeMemory(int(total * utilization), f"gpu_memory_utilization ({utilization})")
