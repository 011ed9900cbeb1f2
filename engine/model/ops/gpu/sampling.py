"""Samples a token of each row, greedily or by its parameters, in Triton and without sorting. See
engine/model/ops/sampling.py.

The plain version sorts tokens, most likely first, and finds where running sums of their weights pass a goal. Here a
search over the values of logits finds the same position, in some 40 passes over the row. With one program per row they
would take a millisecond. So many programs first collect the tokens of a row that are not far below the best one, and
the search runs over these tokens if they suffice. A random number draws the same token as in the plain version, unless
it is so close to the border between two tokens that the order of summation decides. A row's token does not depend on
other rows. Nothing here waits for the device.

Every kernel reads the logits of the model, divides them by the row's temperature and writes to the tokens of all rows,
so a step has one launch for the largest logits, one for greedy rows, and two for rows with filters. Has run under
Triton's interpreter only, not on a GPU yet.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.ops.sampling_plain import MIN_TEMPERATURE, RandomRows

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
def scaled(logits, i, vocab, temperature):
    """Return logits i divided by the temperature, -inf beyond the vocabulary."""
    return tl.div_rn(tl.load(logits + i, mask=i < vocab, other=float("-inf")).to(tl.float32), temperature)


@triton.jit
def load_temperature(temperature, row, LEAST: tl.constexpr):
    return tl.maximum(tl.load(temperature + row), LEAST)


@triton.jit
def load_best(segment_best, row, segments, SEGMENTS_PAD: tl.constexpr):
    """Return the largest logit of a row, or NaN if the row has one."""
    segment = tl.arange(0, SEGMENTS_PAD)
    bests = tl.load(segment_best + row * segments + segment, mask=segment < segments, other=float("-inf"))
    broken = tl.sum((bests != bests).to(tl.int32), 0) > 0
    return tl.where(broken, float("nan"), tl.max(bests, 0))


@triton.jit
def store_token(tokens, row, token, best):
    """Store the token of a row, -1 if its largest logit is not finite."""
    tl.store(tokens + row, tl.where(tl.abs(best) < float("inf"), token.to(tl.int64), -1))


@triton.jit
def best_kernel(logits, segment_best, segment_ids, vocab, stride, SEGMENT: tl.constexpr):
    """Find the largest logit of a segment, and the first token that has it. Grid (rows, segments)."""
    row, segment, segments = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    i = segment * SEGMENT + tl.arange(0, SEGMENT)
    x = tl.load(logits + row * stride + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
    best = tl.max(x, 0)
    broken = tl.sum((x != x).to(tl.int32), 0) > 0
    tl.store(segment_best + row * segments + segment, tl.where(broken, float("nan"), best))
    tl.store(segment_ids + row * segments + segment, tl.min(tl.where(x == best, i, vocab - 1), 0))


@triton.jit
def greedy_kernel(segment_best, segment_ids, tokens, segments, SEGMENTS_PAD: tl.constexpr):
    """Take the first token with the largest logit. Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    best = load_best(segment_best, row, segments, SEGMENTS_PAD)
    segment = tl.arange(0, SEGMENTS_PAD)
    there = segment < segments
    bests = tl.load(segment_best + row * segments + segment, mask=there, other=float("-inf"))
    ids = tl.load(segment_ids + row * segments + segment, mask=there, other=0)
    store_token(tokens, row, tl.min(tl.where(there & (bests == best), ids, 2147483647), 0), best)


@triton.jit
def measures(logits, n, vocab, width, pitch, temperature, best, min_p, COUNT: tl.constexpr):
    """Return the keys of the n-th tokens, and their weights, 0 if dropped by min_p. With COUNT, the weight of each
    remaining token is 1. Tokens lie in rows of `width`, whose starts are `pitch` apart."""
    x = scaled(logits, n // width * pitch + n % width, tl.where(n < vocab, 2147483647, 0), temperature)
    weight = tl.exp(x - best)
    weight = tl.where(weight >= min_p, weight, 0.0)
    return sort_key(x), tl.where(weight > 0.0, 1.0, 0.0) if COUNT else weight


@triton.jit
def find_key(
    logits, vocab, width, pitch, temperature, best, min_p, low, goal,
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
            key, measure = measures(
                logits, first + tl.arange(0, BLOCK), vocab, width, pitch, temperature, best, min_p, COUNT
            )  # fmt: skip
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
def mass_above(logits, vocab, width, pitch, temperature, best, min_p, key, BLOCK: tl.constexpr):
    """Return weight and number of the tokens above a key, and the number of tokens with this key."""
    weights = tl.zeros([BLOCK], tl.float32)
    counts = tl.zeros([BLOCK], tl.int32)
    equals = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab, BLOCK):
        keys, weight = measures(
            logits, first + tl.arange(0, BLOCK), vocab, width, pitch, temperature, best, min_p, False
        )  # fmt: skip
        weights += tl.where(keys > key, weight, 0.0)
        counts += tl.where((keys > key) & (weight > 0.0), 1, 0)
        equals += tl.where((keys == key) & (weight > 0.0), 1, 0)
    return tl.sum(weights, 0), tl.sum(counts, 0), tl.sum(equals, 0)


@triton.jit
def collect_kernel(
    logits, rows, segment_best, temperature, min_p, values, ids, masses, counts, vocab, stride,
    FAR: tl.constexpr, LEAST: tl.constexpr, SEGMENT: tl.constexpr, COLLECTED: tl.constexpr, SEGMENTS_PAD: tl.constexpr,
):  # fmt: skip
    """Collect a segment's tokens that pass min_p and are less than FAR below the best logit. Grid (n, segments): row
    rows[i] of the logits has the i-th parameters.

    Writes logits and ids, in the order of ids, to `values` and `ids` [n, segments, COLLECTED]; -inf after them.
    masses [2, n, segments]: weight of all tokens that pass min_p, and of those that are also near; counts
    [n, segments]: number of the latter.
    """
    own, segment, segments = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row, temperature = tl.load(rows + own), load_temperature(temperature, own, LEAST)
    best = tl.div_rn(load_best(segment_best, row, segments, SEGMENTS_PAD), temperature)
    min_p = tl.load(min_p + own)
    i = segment * SEGMENT + tl.arange(0, SEGMENT)
    x = scaled(logits + row * stride, i, vocab, temperature)
    weight = tl.exp(x - best)
    weight = tl.where(weight >= min_p, weight, 0.0)
    near = (weight > 0.0) & (x > best - FAR)
    slot, count = tl.cumsum(near.to(tl.int32), 0) - 1, tl.sum(near.to(tl.int32), 0)
    at = own * segments + segment
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
    logits, rows, segment_best, values, ids, masses, counts, tokens, temperature, uniform, top_p, min_p, top_k, vocab,
    stride, segments, FAR_WEIGHT: tl.constexpr, LEAST: tl.constexpr, COLLECTED: tl.constexpr,
    SEGMENTS_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw a token of a row. Grid (n): row rows[i] of the logits has the i-th parameters. `floor` is the lowest key
    that filters keep, `kept` how many tokens of it they keep."""
    own = tl.program_id(0).to(tl.int64)
    row, temperature = tl.load(rows + own), load_temperature(temperature, own, LEAST)
    top_p, min_p, top_k = tl.load(top_p + own), tl.load(min_p + own), tl.load(top_k + own)
    largest = load_best(segment_best, row, segments, SEGMENTS_PAD)
    best = tl.div_rn(largest, temperature)
    segment = tl.arange(0, SEGMENTS_PAD)
    at, there = own * segments + segment, segment < segments
    all_mass = tl.sum(tl.load(masses + at, mask=there, other=0.0), 0)
    near_mass = tl.sum(tl.load(masses + tl.num_programs(0) * segments + at, mask=there, other=0.0), 0)
    collected = tl.load(counts + at, mask=there, other=0)
    any_k = top_k >= vocab
    enough = (min_p > FAR_WEIGHT) | (top_k <= tl.sum(collected, 0)) | (any_k & (near_mass >= top_p * all_mass))
    narrow = enough & (tl.max(collected, 0) <= COLLECTED) & (near_mass > 0.0)
    whole_vocab, width, pitch = vocab, vocab, vocab
    if narrow:  # as many of each segment as the fullest has
        logits = values + own * segments * COLLECTED
        width, pitch = tl.max(collected, 0), COLLECTED
        vocab = segments * width
        temperature = tl.full([], 1.0, tl.float32)
    else:
        logits += row * stride

    floor = sort_key(best - 110.0)  # weights there are 0 in float32
    if top_k < whole_vocab:
        floor = find_key(
            logits, vocab, width, pitch, temperature, best, min_p, floor, top_k.to(tl.float32), True, False, BLOCK
        )  # fmt: skip
    mass, count, kept = mass_above(logits, vocab, width, pitch, temperature, best, min_p, floor, BLOCK)
    kept = tl.minimum(kept, top_k - count)
    weight = tl.maximum(weight_of(floor, best), 1e-37)
    total = mass + kept * weight
    if top_p < 1.0:
        # the most likely token always stays, even where top_p is 0
        goal = tl.maximum(top_p, 1e-30) * tl.where(any_k & narrow, all_mass, total)
        key = find_key(logits, vocab, width, pitch, temperature, best, min_p, floor, goal, False, False, BLOCK)
        if key > floor:
            mass, count, kept = mass_above(logits, vocab, width, pitch, temperature, best, min_p, key, BLOCK)
            weight = weight_of(key, best)
        kept = tl.minimum(kept, tl.ceil((goal - mass) / weight).to(tl.int32))
        floor = key
        total = mass + kept * weight

    # strictly below the total, so that rounding never draws what is not kept
    target = tl.minimum(
        tl.load(uniform + own) * total, (total.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
    )
    key = find_key(logits, vocab, width, pitch, temperature, best, min_p, floor, target, False, True, BLOCK)
    if key > floor:
        mass, count, kept = mass_above(logits, vocab, width, pitch, temperature, best, min_p, key, BLOCK)
        weight = weight_of(key, best)
    rank = tl.minimum(tl.floor((target - mass) / weight).to(tl.int32), kept - 1)
    rank = tl.maximum(rank, 0)  # among the tokens of this key, lowest id first
    token = tl.zeros([], tl.int32)
    seen = tl.zeros([], tl.int32)
    for first in range(0, vocab, BLOCK):
        n = first + tl.arange(0, BLOCK)
        keys, weights = measures(logits, n, vocab, width, pitch, temperature, best, min_p, False)
        equal = ((keys == key) & (weights > 0.0)).to(tl.int32)
        order = seen + tl.cumsum(equal, 0) - equal
        token += tl.sum(tl.where((equal == 1) & (order == rank), n // width * pitch + n % width, 0), 0)
        seen += tl.sum(equal, 0)
    if narrow:
        token = tl.load(ids + own * segments * COLLECTED + token)
    store_token(tokens, row, token, largest)


def draw_filtered(logits: Tensor, segment_best: Tensor, group: RandomRows, tokens: Tensor) -> None:
    """Draw a token for each row of a group with filters."""
    (count, vocab), segments, device = (len(group.rows), logits.shape[1]), segment_best.shape[1], logits.device
    values = torch.empty(count, segments, COLLECTED, dtype=torch.float32, device=device)
    ids, counts = (torch.empty(shape, dtype=torch.int32, device=device) for shape in (values.shape, (count, segments)))
    masses = torch.empty(2, count, segments, dtype=torch.float32, device=device)
    pad = triton.next_power_of_2(segments)
    collect_kernel[count, segments](
        logits, group.rows, segment_best, group.temperature, group.min_p, values, ids, masses, counts, vocab,
        logits.stride(0), FAR=FAR, LEAST=MIN_TEMPERATURE, SEGMENT=SEGMENT, COLLECTED=COLLECTED, SEGMENTS_PAD=pad,
        num_warps=8,
    )  # fmt: skip
    draw_kernel[count,](
        logits, group.rows, segment_best, values, ids, masses, counts, tokens, group.temperature, group.uniform,
        group.top_p, group.min_p, group.top_k, vocab, logits.stride(0), segments, FAR_WEIGHT=math.exp(-FAR),
        LEAST=MIN_TEMPERATURE, COLLECTED=COLLECTED, SEGMENTS_PAD=pad, BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip


@triton.jit
def draw_any_kernel(
    logits, rows, segment_best, tokens, temperature, uniform, vocab, stride, segments,
    LEAST: tl.constexpr, SEGMENTS_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw the token at which the running sum of weights exceeds `target`. Grid (n): row rows[i] of the logits has the
    i-th parameters. Tokens of weight 0 are excluded by their weight, since sums in another order differ slightly."""
    own = tl.program_id(0).to(tl.int64)
    row, temperature = tl.load(rows + own), load_temperature(temperature, own, LEAST)
    logits += row * stride
    largest = load_best(segment_best, row, segments, SEGMENTS_PAD)
    best = tl.div_rn(largest, temperature)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        sums += tl.exp(scaled(logits, first + tl.arange(0, BLOCK), vocab, temperature) - best)
    target = tl.load(uniform + own) * tl.sum(sums, 0)

    first = tl.zeros([], tl.int32)
    start = tl.zeros([], tl.int32)  # start of the token's block: the last block read that has weights above 0
    before = tl.zeros([], tl.float32)
    seen = tl.zeros([], tl.float32)
    while first < vocab:
        mass = tl.sum(tl.exp(scaled(logits, first + tl.arange(0, BLOCK), vocab, temperature) - best), 0)
        start = tl.where(mass > 0.0, first, start)
        before = tl.where(mass > 0.0, seen, before)
        seen += mass
        first = tl.where(seen > target, vocab, first + BLOCK)
    i = start + tl.arange(0, BLOCK)
    weight = tl.exp(scaled(logits, i, vocab, temperature) - best)
    after = (weight > 0.0) & (before + tl.cumsum(weight, 0) > target)
    token = tl.min(tl.where(after, i, vocab), 0)
    token = tl.where(token < vocab, token, tl.max(tl.where(weight > 0.0, i, 0), 0))
    store_token(tokens, row, token, largest)


def draw_any(logits: Tensor, segment_best: Tensor, group: RandomRows, tokens: Tensor) -> None:
    """Draw a token for each row of a group without filters, from the whole vocabulary. Sums by torch run in parallel
    and may grow slightly at a token of weight 0, so that a banned token is drawn; this also checks weights."""
    vocab, segments = logits.shape[1], segment_best.shape[1]
    draw_any_kernel[len(group.rows),](
        logits, group.rows, segment_best, tokens, group.temperature, group.uniform, vocab, logits.stride(0), segments,
        LEAST=MIN_TEMPERATURE, SEGMENTS_PAD=triton.next_power_of_2(segments), BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip


def sample_rows(logits: Tensor, random: list[RandomRows]) -> Tensor:
    (rows, vocab), device = logits.shape, logits.device
    segments = triton.cdiv(vocab, SEGMENT)
    best = torch.empty(rows, segments, dtype=torch.float32, device=device)
    ids, tokens = (torch.empty(shape, dtype=dtype, device=device) for shape, dtype in (
        (best.shape, torch.int32), (rows, torch.int64)
    ))  # fmt: skip
    best_kernel[rows, segments](logits, best, ids, vocab, logits.stride(0), SEGMENT=SEGMENT, num_warps=8)
    if sum(len(group.rows) for group in random) < rows:
        greedy_kernel[rows,](best, ids, tokens, segments, SEGMENTS_PAD=triton.next_power_of_2(segments))
    for group in random:
        (draw_filtered if group.width else draw_any)(logits, best, group, tokens)
    return tokens
