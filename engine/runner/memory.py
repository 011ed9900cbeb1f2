"""How much memory one rank has for its KV cache."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from engine.runner import kv_cache
from engine.runner.images import EncoderCache
from engine.runner.rank_setup import RankSetup

logger = logging.getLogger(__name__)

CUBLAS_BYTES = 32 << 20  # workspace of each thread that multiplies, at most (ATen's CublasHandlePool.cpp)


def plan_blocks(
    setup: RankSetup,
    run_dummy_step: Callable[[int, int], None],
    encoder_cache: EncoderCache | None,
    drafter_block_bytes: int,
) -> tuple[list[int], int]:
    """Return the blocks of each KV cache group, the same on all ranks, and the longest sequence that they and the model
    allow.

    run_dummy_step: of (tokens, sequences). drafter_block_bytes: that a drafter needs for each block of the first.
    Raises OutOfMemory if the configured lengths do not fit.
    """
    if setup.torch_device.type == "cpu":
        free = kv_cache.free_host_bytes() // setup.tp.local_size
    else:
        free = free_gpu_bytes(setup, run_dummy_step, encoder_cache)
    config, size, model, dtype, tp = setup.config, setup.block_size, setup.model, setup.kv_dtype, setup.tp
    blocks, longest = kv_cache.choose_num_blocks(
        config, size, model, dtype, setup.torch_device, tp, free_bytes=free, drafter_bytes=drafter_block_bytes
    )
    of_ranks = [map(int, answer.split()) for answer in tp.exchange(" ".join(map(str, blocks)))]
    blocks = [min(counts) for counts in zip(*of_ranks, strict=True)]
    needs = kv_cache.group_needs(config, size, model, dtype, tp)
    return blocks, min(longest, kv_cache.longest_that_fits(needs, longest, blocks))


def free_gpu_bytes(
    setup: RankSetup, run_dummy_step: Callable[[int, int], None], encoder_cache: EncoderCache | None
) -> int:
    """Return the bytes that `gpu_memory_utilization` leaves for the KV cache after weights, graphs and the
    activations of the largest step, which is run to measure them."""
    config = setup.config
    largest_step = config.max_num_batched_tokens, config.max_num_seqs
    run_dummy_step(*largest_step)  # compiles kernels and loads libraries, whose memory stays in use
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_dummy_step(*largest_step)
    torch.cuda.synchronize()
    activations = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    used = total - free
    graphs = 0 if config.enforce_eager else int(config.cuda_graph_memory_gib * 2**30)
    longest = setup.model.longest_sequence(config.max_model_len)
    tables = len(setup.model.kv_groups) * -(-longest // setup.block_size)
    sequences = 4 * config.max_num_seqs * (longest + tables)  # tables, and the history
    threads = CUBLAS_BYTES * (setup.tp.size > 1)  # with other ranks, EngineCore launches steps in another thread
    if encoder_cache is not None:
        activations += config.encoder_cache_size * encoder_cache.embedding_bytes
    logger.info(
        "profiled the largest step: %.2f GiB above %.2f GiB in use; %.2f GiB are kept for graphs, %.2f for tokens "
        "and block tables",
        activations / 2**30, used / 2**30, graphs / 2**30, sequences / 2**30,
    )  # fmt: skip
    return int(total * config.gpu_memory_utilization) - used - activations - graphs - sequences - threads
