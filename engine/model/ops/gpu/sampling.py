"""Draws tokens from the whole vocabulary, or under min_p, top_k and top_p without sorting it, in Triton. See
engine/model/ops/sampling.py.

The plain version sorts tokens, most likely first, and finds where running sums of their weights pass a goal. Here a
search over the values of logits finds the same position, in some 40 passes over the row. One program per row would take
a millisecond for them; so many programs first collect the tokens of a row that are not far below the best one, and the
search runs over these if they suffice. A random number draws the same token as in the plain version, unless it is so
close to the border between two tokens that the order of summation decides. A row's token does not depend on other rows.
Nothing here waits for the device. Collecting has run under Triton's interpreter only, not on a GPU yet.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.ops.sampling_plain import RandomRows

BLOCK = 4096
SEGMENT = 8192  # tokens of the vocabulary from which a program collects
COLLECTED = 1024  # most tokens collected of a segment; if more are near, the search runs over the whole row
FAR = 10.0  # distance below the best logit up to which tokens are near: weights above 5e-5


@triton.jit
def sort_key(x):
    """Map float32 to int32, keeping the order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def weight_of(key, best):
    """Return the probability of a logit relative to that of the best one, from its sort key."""
    return tl.exp((key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True) - best)


@triton.jit
def measures(logits, i, vocab, best, min_p, COUNT: tl.constexpr):
    """Return the keys of tokens i, and their weights, 0 if dropped by min_p. With COUNT, remaining tokens weigh 1."""
    x = tl.load(logits + i, mask=i < vocab, other=float("-inf"))
    weight = tl.exp(x - best)
    weight = tl.where(weight >= min_p, weight, 0.0)
    return sort_key(x), tl.where(weight > 0.0, 1.0, 0.0) if COUNT else weight


@triton.jit
def find_key(
    logits, vocab, best, min_p, low, goal,
    COUNT: tl.constexpr, STRICT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the largest key above `low` at which the tokens at or above it together reach the goal (with STRICT:
    exceed it); `low` if there is none. Each pass over the row tries three keys and leaves a quarter of the range."""
    below = tl.cast(low, tl.int64)  # a key at which the goal is reached
    above = tl.cast(sort_key(best), tl.int64) + 1  # a key at which it is not, since no token has it
    while above - below > 1:
        step = tl.maximum((above - below) // 4, 1)
        a, b, c = below + step, below + 2 * step, below + 3 * step
        sums_a = tl.zeros([BLOCK], tl.float32)
        sums_b = tl.zeros([BLOCK], tl.float32)
        sums_c = tl.zeros([BLOCK], tl.float32)
        for first in range(0, vocab, BLOCK):
            key, measure = measures(logits, first + tl.arange(0, BLOCK), vocab, best, min_p, COUNT)
            sums_a += tl.where(key >= a, measure, 0.0)
            sums_b += tl.where(key >= b, measure, 0.0)
            sums_c += tl.where(key >= c, measure, 0.0)
        sum_a, sum_b, sum_c = tl.sum(sums_a, 0), tl.sum(sums_b, 0), tl.sum(sums_c, 0)
        at_a = sum_a > goal if STRICT else sum_a >= goal
        at_b = sum_b > goal if STRICT else sum_b >= goal
        at_c = sum_c > goal if STRICT else sum_c >= goal
        above = tl.where(at_c, above, tl.where(at_b, c, tl.where(at_a, b, a)))
        below = tl.where(at_c, c, tl.where(at_b, b, tl.where(at_a, a, below)))
    return below.to(tl.int32)


@triton.jit
def mass_above(logits, vocab, best, min_p, key, BLOCK: tl.constexpr):
    """Return weight and number of the tokens above a key, and the number of tokens with this key."""
    weights = tl.zeros([BLOCK], tl.float32)
    counts = tl.zeros([BLOCK], tl.int32)
    equals = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab, BLOCK):
        keys, weight = measures(logits, first + tl.arange(0, BLOCK), vocab, best, min_p, False)
        weights += tl.where(keys > key, weight, 0.0)
        counts += tl.where((keys > key) & (weight > 0.0), 1, 0)
        equals += tl.where((keys == key) & (weight > 0.0), 1, 0)
    return tl.sum(weights, 0), tl.sum(counts, 0), tl.sum(equals, 0)


@triton.jit
def collect_kernel(
    logits, best, min_p, values, ids, masses, counts, vocab, stride,
    FAR: tl.constexpr, SEGMENT: tl.constexpr, COLLECTED: tl.constexpr,
):  # fmt: skip
    """Collect a segment's tokens that pass min_p and are less than FAR below the best logit. Grid (rows, segments).

    Writes logits and ids, in the order of ids, to `values` and `ids` [rows, segments, COLLECTED]; -inf after them.
    masses [2, rows, segments]: weight of all tokens that pass min_p, and of those that are also near; counts
    [rows, segments]: number of the latter.
    """
    row, segment, segments = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    best, min_p = tl.load(best + row), tl.load(min_p + row)
    i = segment * SEGMENT + tl.arange(0, SEGMENT)
    x = tl.load(logits + row * stride + i, mask=i < vocab, other=float("-inf"))
    weight = tl.exp(x - best)
    weight = tl.where(weight >= min_p, weight, 0.0)
    near = (weight > 0.0) & (x > best - FAR)
    slot, count = tl.cumsum(near.to(tl.int32), 0) - 1, tl.sum(near.to(tl.int32), 0)
    at = row * segments + segment
    tl.store(counts + at, count)
    tl.store(masses + at, tl.sum(weight, 0))
    tl.store(masses + tl.num_programs(0) * segments + at, tl.sum(tl.where(near, weight, 0.0), 0))
    near = near & (slot < COLLECTED)
    tl.store(values + at * COLLECTED + slot, x, mask=near)
    tl.store(ids + at * COLLECTED + slot, i, mask=near)
    rest = tl.arange(0, COLLECTED)
    tl.store(values + at * COLLECTED + rest, float("-inf"), mask=rest >= count)


@triton.jit
def draw_kernel(
    logits, best, values, ids, masses, counts, tokens, uniform, top_p, min_p, top_k, vocab, stride, segments,
    FAR_WEIGHT: tl.constexpr, COLLECTED: tl.constexpr, SEGMENTS_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw a token of a row. Grid (rows). `floor` is the lowest key that filters keep, `kept` how many tokens of it
    they keep."""
    row = tl.program_id(0).to(tl.int64)
    best, top_p, min_p, top_k = (
        tl.load(best + row), tl.load(top_p + row), tl.load(min_p + row), tl.load(top_k + row)
    )  # fmt: skip
    segment = tl.arange(0, SEGMENTS_PAD)
    at, there = row * segments + segment, segment < segments
    all_mass = tl.sum(tl.load(masses + at, mask=there, other=0.0), 0)
    near_mass = tl.sum(tl.load(masses + tl.num_programs(0) * segments + at, mask=there, other=0.0), 0)
    collected = tl.load(counts + at, mask=there, other=0)
    any_k = top_k >= vocab
    enough = (min_p > FAR_WEIGHT) | (top_k <= tl.sum(collected, 0)) | (any_k & (near_mass >= top_p * all_mass))
    narrow = enough & (tl.max(collected, 0) <= COLLECTED) & (near_mass > 0.0)
    whole_vocab = vocab
    if narrow:
        logits = values + row * segments * COLLECTED
        vocab = segments * COLLECTED
    else:
        logits += row * stride

    floor = sort_key(best - 110.0)  # weights there are 0 in float32
    if top_k < whole_vocab:
        floor = find_key(logits, vocab, best, min_p, floor, top_k.to(tl.float32), True, False, BLOCK)
    mass, count, kept = mass_above(logits, vocab, best, min_p, floor, BLOCK)
    kept = tl.minimum(kept, top_k - count)
    weight = tl.maximum(weight_of(floor, best), 1e-37)
    total = mass + kept * weight
    if top_p < 1.0:
        # the most likely token always stays, even where top_p is 0
        goal = tl.maximum(top_p, 1e-30) * tl.where(any_k & narrow, all_mass, total)
        key = find_key(logits, vocab, best, min_p, floor, goal, False, False, BLOCK)
        if key > floor:
            mass, count, kept = mass_above(logits, vocab, best, min_p, key, BLOCK)
            weight = weight_of(key, best)
        kept = tl.minimum(kept, tl.ceil((goal - mass) / weight).to(tl.int32))
        floor = key
        total = mass + kept * weight

    # strictly below the total, so that rounding never draws what is not kept
    target = tl.minimum(
        tl.load(uniform + row) * total, (total.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
    )
    key = find_key(logits, vocab, best, min_p, floor, target, False, True, BLOCK)
    if key > floor:
        mass, count, kept = mass_above(logits, vocab, best, min_p, key, BLOCK)
        weight = weight_of(key, best)
    rank = tl.minimum(tl.floor((target - mass) / weight).to(tl.int32), kept - 1)
    rank = tl.maximum(rank, 0)  # among the tokens of this key, lowest id first
    token = tl.zeros([], tl.int32)
    seen = tl.zeros([], tl.int32)
    for first in range(0, vocab, BLOCK):
        i = first + tl.arange(0, BLOCK)
        keys, weights = measures(logits, i, vocab, best, min_p, False)
        equal = ((keys == key) & (weights > 0.0)).to(tl.int32)
        order = seen + tl.cumsum(equal, 0) - equal
        token += tl.sum(tl.where((equal == 1) & (order == rank), i, 0), 0)
        seen += tl.sum(equal, 0)
    if narrow:
        token = tl.load(ids + row * segments * COLLECTED + token)
    tl.store(tokens + row, token.to(tl.int64))


def draw_filtered(logits: Tensor, uniform: Tensor, top_p: Tensor, min_p: Tensor, top_k: Tensor) -> Tensor:
    """Draw tokens [rows] int64, arbitrary for a row without a finite best logit.

    logits: [rows, vocab] float32, already divided by temperature
    uniform, top_p, min_p: [rows, 1] float32; top_k: [rows, 1] int32, the vocabulary's size or more for none
    """
    (rows, vocab), device = logits.shape, logits.device
    segments = triton.cdiv(vocab, SEGMENT)
    best = logits.amax(-1)
    values = torch.empty(rows, segments, COLLECTED, dtype=torch.float32, device=device)
    ids, counts = (torch.empty(shape, dtype=torch.int32, device=device) for shape in (values.shape, (rows, segments)))
    masses = torch.empty(2, rows, segments, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    collect_kernel[rows, segments](
        logits, best, min_p, values, ids, masses, counts, vocab, logits.stride(0),
        FAR=FAR, SEGMENT=SEGMENT, COLLECTED=COLLECTED, num_warps=8,
    )  # fmt: skip
    draw_kernel[rows,](
        logits, best, values, ids, masses, counts, tokens, uniform, top_p, min_p, top_k, vocab, logits.stride(0),
        segments, FAR_WEIGHT=math.exp(-FAR), COLLECTED=COLLECTED, SEGMENTS_PAD=triton.next_power_of_2(segments),
        BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip
    return tokens


@triton.jit
def draw_any_kernel(logits, tokens, uniform, vocab, stride, BLOCK: tl.constexpr):
    """Draw the token at which the running sum of weights exceeds `target`. Grid (rows). Tokens of weight 0 are excluded
    by their weight, since sums in another order differ slightly."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)  # sums of weights relative to `top`
    for first in range(0, vocab, BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(logits + i, mask=i < vocab, other=float("-inf"))
        higher = tl.maximum(top, x)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        sums = sums * tl.exp(top - base) + tl.exp(x - base)
        top = higher
    best = tl.max(top, 0)
    best = tl.where(best == float("-inf"), 0.0, best)
    target = tl.load(uniform + row) * tl.sum(sums * tl.exp(top - best), 0)

    first = tl.zeros([], tl.int32)
    start = tl.zeros([], tl.int32)  # start of the token's block: the last block read that has weights above 0
    before = tl.zeros([], tl.float32)
    seen = tl.zeros([], tl.float32)
    while first < vocab:
        i = first + tl.arange(0, BLOCK)
        mass = tl.sum(tl.exp(tl.load(logits + i, mask=i < vocab, other=float("-inf")) - best), 0)
        start = tl.where(mass > 0.0, first, start)
        before = tl.where(mass > 0.0, seen, before)
        seen += mass
        first = tl.where(seen > target, vocab, first + BLOCK)
    i = start + tl.arange(0, BLOCK)
    weight = tl.exp(tl.load(logits + i, mask=i < vocab, other=float("-inf")) - best)
    after = (weight > 0.0) & (before + tl.cumsum(weight, 0) > target)
    token = tl.min(tl.where(after, i, vocab), 0)
    token = tl.where(token < vocab, token, tl.max(tl.where(weight > 0.0, i, 0), 0))
    tl.store(tokens + row, token.to(tl.int64))


def draw_any(logits: Tensor, uniform: Tensor) -> Tensor:
    """Draw tokens [rows] int64, arbitrary for a row without a finite best logit.

    logits: [rows, vocab] float32, already divided by temperature; uniform: [rows, 1] float32
    """
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    draw_any_kernel[rows,](logits, tokens, uniform, vocab, logits.stride(0), BLOCK=BLOCK, num_warps=16)
    return tokens


def draw_rows(logits: Tensor, best: Tensor, group: RandomRows) -> Tensor:
    """Draw as in ops/sampling.py. Sums by torch run in parallel and may grow slightly at a token of weight 0, so that a
    banned token is drawn; `draw_any` also checks weights."""
    scaled = group.scaled(logits)
    if group.width:
        return draw_filtered(scaled, group.uniform, group.top_p, group.min_p, group.top_k)
    return draw_any(scaled, group.uniform)
