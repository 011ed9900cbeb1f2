"""Computes how much memory one rank has for its KV cache."""

from __future__ import annotations

from engine.devices.free_memory import FreeMemory
from engine.runner import kv_cache
from engine.runner.rank_part import RankParts
from engine.runner.rank_setup import RankSetup


def plan_blocks(setup: RankSetup, free: FreeMemory, parts: RankParts) -> tuple[list[int], int]:
    """Return (blocks of each KV cache group, longest sequence in tokens).

    Both are the smallest of any rank, so that all ranks agree, and all engines that share experts. Raises OutOfMemory
    if the configured lengths, or what parts need, do not fit.
    """
    config, size, model, dtype, tp = setup.config, setup.block_size, setup.model, setup.kv_dtype, setup.tp
    for reserve in parts.reserve:
        free = reserve(free)
    blocks, longest = kv_cache.choose_num_blocks(
        config,
        size,
        model,
        dtype,
        setup.torch_device,
        tp,
        free=free,
        part_bytes=parts.block_bytes,
        state_bytes=parts.state_bytes,
    )
    answers = tp.all_engines.exchange(" ".join(map(str, blocks)))
    of_ranks = [map(int, answer.split()) for answer in answers]
    blocks = [min(counts) for counts in zip(*of_ranks, strict=True)]
    needs = kv_cache.group_needs(config, size, model, dtype, tp)
    return blocks, min(longest, kv_cache.longest_that_fits(needs, longest, blocks))
