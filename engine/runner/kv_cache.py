"""Computes how many KV blocks fit, and allocates the tensors that hold them."""

from __future__ import annotations

import logging
import math
import mmap
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.devices.free_memory import FreeMemory
from engine.distributed.tp_group import TPGroup
from engine.engine_options import EngineOptions
from engine.errors import OutOfMemory
from engine.model.config import ModelConfig
from engine.model.kv_groups import KVCacheGroup
from engine.runner.rank_part import RankParts
from engine.runner.rank_setup import RankSetup

logger = logging.getLogger(__name__)

GIB = 2**30
CPU_DEFAULT_GIB = 2.0
WINDOW_STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class GroupNeed:
    """How many blocks sequences need in one KV cache group."""

    group: KVCacheGroup
    block_size: int
    block_bytes: int
    step_tokens: int
    """Tokens of a step that a group with a window has blocks for, in addition to the windows of all sequences."""

    def held(self, length: int) -> int:
        """Return how many blocks a decoding sequence of up to `length` tokens holds at most."""
        whole, window = -(-length // self.block_size), self.group.spec.window
        return whole if window is None else min(whole, -(-window // self.block_size) + 1)

    def most(self, length: int, seqs: int) -> int:
        """Return the maximum number of blocks that `seqs` concurrent sequences can use. In a group with a window, this
        is more than the sequences hold, since the prefix cache keeps another window for each."""
        window = self.group.spec.window
        return self.of(length, seqs) + (0 if window is None else seqs * self.held(length))

    def of(self, length: int, seqs: int = 1) -> int:
        """Return how many blocks `seqs` sequences of `length` tokens need, together with a step that computes
        prompts."""
        if self.group.spec.window is None:
            return seqs * self.held(length)
        whole, step = -(-length // self.block_size), -(-self.step_tokens // self.block_size)
        return min(seqs * whole, seqs * self.held(length) + step)


def group_needs(
    config: EngineOptions, block_size: int, model: ModelConfig, dtype: torch.dtype, tp: TPGroup, part_bytes: int = 0
) -> list[GroupNeed]:
    """Return each KV cache group's need. part_bytes: bytes that parts need per block of the first group."""
    step = window_step_tokens(config, model)
    return [
        GroupNeed(
            group,
            block_size,
            torch.Size(group.block_shape(block_size, tp.size)).numel() * dtype.itemsize + (0 if i else part_bytes),
            step,
        )
        for i, group in enumerate(model.kv_groups)
    ]


def window_step_tokens(config: EngineOptions, model: ModelConfig) -> int:
    """Return how many tokens of one prompt every step has room for in a group with a window. A step may compute more
    tokens if more blocks are free."""
    return max(min(config.max_num_batched_tokens, WINDOW_STEP_TOKENS), model.longest_span)


def plan_blocks(setup: RankSetup, free: FreeMemory, parts: RankParts) -> tuple[list[int], int]:
    """Return (blocks of each KV cache group, longest sequence in tokens).

    Both are the smallest of any rank, so that all ranks agree, and all engines that share experts. Raises OutOfMemory
    if the configured lengths, or what parts need, do not fit.
    """
    config, model, tp = setup.config, setup.model, setup.tp
    for reserve in parts.reserve:
        free = reserve(free)
    needs = group_needs(config, setup.block_size, model, setup.kv_dtype, tp, parts.block_bytes)
    longest = model.longest_sequence(config.max_model_len)
    blocks, longest = choose_num_blocks(config, needs, longest, setup.torch_device, free, parts.state_bytes)
    answers = tp.all_engines.exchange(" ".join(map(str, blocks)))
    of_ranks = [map(int, answer.split()) for answer in answers]
    blocks = [min(counts) for counts in zip(*of_ranks, strict=True)]
    return blocks, min(longest, longest_that_fits(needs, longest, blocks))


def choose_num_blocks(
    config: EngineOptions,
    needs: list[GroupNeed],
    longest: int,
    device: torch.device,
    free: FreeMemory,
    state_bytes: int = 0,
) -> tuple[list[int], int]:
    """Return the number of blocks of each KV cache group, and max_model_len. Log the limit that sets them.

    longest: tokens of the longest sequence that the model and the options allow. free: on a GPU, memory for the KV
    cache, measured by a profiling run; on a CPU, this rank's part of the machine's. state_bytes: bytes of snapshots of
    states. Raises OutOfMemory if the configured `max_model_len` does not fit, or nothing fits at all.
    """
    desired = [need.most(longest, config.max_num_seqs) for need in needs]
    if not any(need.block_bytes for need in needs):
        logger.info("kv cache: none, since this model keeps no KV; max_model_len=%d", longest)
        return desired, longest
    if config.num_gpu_blocks_override is not None:
        first, *others = config.num_gpu_blocks_override, *desired[1:]
        blocks, limit = [first, *(min(first, other) for other in others)], "num_gpu_blocks_override"
        if (used := total_bytes(needs, blocks) + state_bytes) > free.size:
            fit, more = max(0, first * free.size // used), " and states" if state_bytes else ""
            raise OutOfMemory(
                f"num_gpu_blocks_override={first} needs {used / GIB:.2f} GiB of KV cache{more}, but only {free}; "
                f"at most {fit} blocks fit"
            )
    else:
        budget, limit = kv_budget(config, device, free)
        blocks = divide(max(0, budget - state_bytes), needs, longest, config.max_num_seqs)
        if blocks == desired:
            limit = f"max_num_seqs ({config.max_num_seqs}) x max_model_len ({longest})"
    tokens = longest_that_fits(needs, longest, blocks)
    shortest = config.max_model_len or 2  # one token of prompt and one of output
    if tokens < shortest:
        needed = [need.of(shortest) for need in needs]
        total = total_bytes(needs, needed) + state_bytes
        more = f"raise kv_cache_memory_bytes to at least {total}"
        if config.num_gpu_blocks_override is not None:
            more = f"raise num_gpu_blocks_override to at least {needed[0]}"
        elif total > free.size:
            more = f"only {free}: free {(total - free.size) / GIB:.3g} GiB"
        less = f", or lower max_model_len to {tokens} or less" if tokens >= 2 else ""
        raise OutOfMemory(
            f"the KV cache holds {tokens} tokens (limited by {limit}), but one request of {shortest} tokens "
            f"needs {sum(needed)} blocks, {total_bytes(needs, needed) / GIB:.3g} GiB; {more}{less}"
        )
    max_model_len = min(longest, tokens)
    log_size(needs, blocks, limit, max_model_len)
    return blocks, max_model_len


def total_bytes(needs: list[GroupNeed], blocks: list[int]) -> int:
    """Return the bytes of the blocks of all groups. blocks: the number in each group."""
    return sum(count * need.block_bytes for need, count in zip(needs, blocks, strict=True))


def longest_that_fits(needs: list[GroupNeed], longest: int, blocks: list[int]) -> int:
    """Return the length in tokens of the longest sequence that fits if it runs alone: whole blocks, at most `longest`.
    blocks: the number in each group."""
    size = needs[0].block_size
    return size * most(
        -(-longest // size), lambda n: all(need.of(n * size) <= have for need, have in zip(needs, blocks, strict=True))
    )


def most(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from 0 to `limit` that fits. fits: False for all numbers above one that fails."""
    return bisect_left(range(1, limit + 1), True, key=lambda n: not fits(n))


def divide(budget: int, needs: list[GroupNeed], longest: int, max_num_seqs: int) -> list[int]:
    """Return how many blocks of each group fit into `budget` bytes, but no more than `max_num_seqs` sequences can use.

    The right proportion between groups depends on the length of sequences, which is unknown. So each group first gets
    the blocks of one sequence of `longest` tokens, or of the longest that fits. The rest is divided in proportion to
    what more a group could use if all sequences had equal length and filled the memory: its maximum over all lengths.
    """
    desired = [need.most(longest, max_num_seqs) for need in needs]
    if total_bytes(needs, desired) <= budget:
        return desired
    size = needs[0].block_size
    count = most(-(-longest // size), lambda n: total_bytes(needs, [need.of(n * size) for need in needs]) <= budget)
    blocks = [need.of(count * size) for need in needs]
    wanted = list(blocks)
    for n in [*(1 << i for i in range(count.bit_length())), count] if count else []:
        held = [need.held(n * size) for need in needs]
        seqs = min(max_num_seqs, max(1, budget // total_bytes(needs, held)))
        wanted = [max(w, need.of(n * size, seqs)) for w, need in zip(wanted, needs, strict=True)]
    rest = budget - total_bytes(needs, blocks)
    more = [w - b for w, b in zip(wanted, blocks, strict=True)]
    whole = total_bytes(needs, more)
    if whole:
        blocks = [min(d, b + m * rest // whole) for d, b, m in zip(desired, blocks, more, strict=True)]
    spare = (budget - total_bytes(needs, blocks)) // max(1, needs[0].block_bytes)  # 0 in a stage without its layers
    return [min(desired[0], blocks[0] + spare), *blocks[1:]]


def log_size(needs: list[GroupNeed], blocks: list[int], limit: str, max_model_len: int) -> None:
    size, used = needs[0].block_size, total_bytes(needs, blocks) / GIB
    tokens = blocks[0] * size
    logger.info(
        "kv cache: %d tokens fit (%d blocks of %d, %.2f GiB), limited by %s: %.1f requests of max_model_len %d",
        tokens, blocks[0], size, used, limit, full_requests(needs, blocks, max_model_len), max_model_len,
    )  # fmt: skip
    for group in describe_groups(needs, blocks):
        logger.info("kv cache: %s", group)


def describe_groups(needs: list[GroupNeed], blocks: list[int]) -> list[str]:
    """Return a text for each group that says what the group keeps, and its size; empty if there is only one group."""
    kept = ["all" if (window := need.group.spec.window) is None else f"the newest {window:,}" for need in needs]
    return [
        f"{len(need.group.layers)} layers that keep {tokens} tokens: {count:,} blocks, "
        f"{count * need.block_bytes / GIB:.2f} GiB"
        for need, tokens, count in zip(needs, kept, blocks, strict=True)
        if len(needs) > 1
    ]


def full_requests(needs: list[GroupNeed], blocks: list[int], length: int) -> float:
    """Return how many sequences of this length these blocks hold at a time."""
    return min(
        count * need.block_size / length if need.group.spec.window is None else count / need.held(length)
        for need, count in zip(needs, blocks, strict=True)
    )


def kv_budget(config: EngineOptions, device: torch.device, free: FreeMemory) -> tuple[int, str]:
    """Return the bytes for the KV cache and the name of the limit that sets them. Raises OutOfMemory if a configured
    size is not free."""
    if (requested := config.kv_cache_memory_bytes) is not None:
        if requested > free.size:
            raise OutOfMemory(f"kv_cache_memory_bytes={requested} does not fit: only {free}")
        return requested, f"kv_cache_memory_bytes ({requested})"
    if device.type == "cuda":
        return free.size, free.limit
    default = int(CPU_DEFAULT_GIB * GIB)
    if free.size // 2 < default:
        return free.size // 2, f"half of the free {max(0, free.size) / GIB:.2f} GiB ({free.limit})"
    return default, f"the default on a CPU ({CPU_DEFAULT_GIB} GiB)"


def allocate(
    num_blocks: int, group: KVCacheGroup, block_size: int, dtype: torch.dtype, device: torch.device, tp: TPGroup
) -> Tensor:
    """Return [num_blocks, layers, parts, kv_heads, block_size, head_dim], zeroed so that a padded read never meets NaN.
    A group with a window gets one more block, its null block.

    On a CPU, pages are taken only when first written; torch.zeros would write all of them.
    """
    num_blocks += group.spec.window is not None
    shape = (num_blocks, *group.block_shape(block_size, tp.size))
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
