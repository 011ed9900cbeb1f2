"""Samples a token of each row, greedily or by its parameters, in Triton and without sorting, in two launches. See
engine/model/ops/sampling.py.

The plain version sorts tokens, most likely first, and finds where running sums of their weights pass a goal. Here a
search over the values of logits finds the same position, in some 40 passes over the row. With one program per row they
would take a millisecond. So the first launch has many programs for a row. Each finds the best token of a segment of the
vocabulary, sums up the segment's weights, and collects its tokens that are not far below the best. In the second
launch, one program per row combines the segments and searches over the collected tokens, if they suffice. A random
number draws the same token as in the plain version, unless it is so close to the border between two tokens that the
order of summation decides. A row's token does not depend on other rows. Nothing here waits for the device. Has run
under Triton's interpreter only, not on a GPU yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.ops.gpu import dependent_launch
from engine.model.ops.sampling_plain import MIN_TEMPERATURE, RandomRows
from engine.wire.plan import ALL_TOKENS_BANNED

BLOCK = 4096
SEGMENT = 8192  # tokens of the vocabulary from which a program collects
COLLECTED = 1024  # most tokens collected of a segment
FAR = 10.0  # distance below the best logit up to which tokens are near: weights above 5e-5
NONE = tl.constexpr(2147483647)
BANNED = tl.constexpr(ALL_TOKENS_BANNED)


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
def store_token(tokens, row, token, best):
    """Store the token of a row. If its largest logit is not finite: BANNED for -inf, else -1."""
    token = tl.where(tl.abs(best) < float("inf"), token.to(tl.int64), -1)
    tl.store(tokens + row, tl.where(best == float("-inf"), BANNED, token))


@triton.jit
def measures(logits, n, vocab, width, pitch, temperature, best, min_p, COUNT: tl.constexpr):
    """Return the keys of the tokens at places n, and their weights, 0 if dropped by min_p. With COUNT, the weight of
    each remaining token is 1. Tokens lie in rows of `width`, whose starts are `pitch` apart."""
    x = scaled(logits, n // width * pitch + n % width, tl.where(n < vocab, 2147483647, 0), temperature)
    weight = tl.exp(x - best)
    weight = tl.where(weight >= min_p, weight, 0.0)
    return sort_key(x), tl.where(weight > 0.0, 1.0, 0.0) if COUNT else weight


@triton.jit
def find_key(
    logits, vocab, width, pitch, temperature, best, min_p, low, goal,
    COUNT: tl.constexpr, STRICT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the largest key above `low` for which tokens with this or a larger key reach the goal (STRICT: exceed the
    goal); `low` if there is none. Each pass over the row tries three keys and leaves a quarter of the range."""
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
def has_filters(top_k, top_p, min_p, vocab):
    return (top_k < vocab) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit
def collect_kernel(
    logits, rows, temperature, top_p, min_p, top_k, bests, best_ids, masses, limits, counts, values, ids, vocab,
    stride, GREEDY: tl.constexpr, FAR: tl.constexpr, LEAST: tl.constexpr, SEGMENT: tl.constexpr,
    COLLECTED: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Read a segment of a row. Grid (n, segments). With GREEDY, the rows are the first n of the logits; else row
    rows[i] has the i-th parameters.

    bests, best_ids [n, segments]: the largest logit, NaN if there is one, and the first token that has it
    masses [n, segments]: sum of weights relative to the best token of the segment, for rows that are not greedy
    For rows with filters: limits [n, segments], above which all tokens are collected; counts [n, segments]; values and
    ids [n, segments, COLLECTED], logits and tokens in the order of ids, -inf after them.
    """
    dependent_launch.begin(DEPENDENT)
    own, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at, row = own * tl.num_programs(1) + segment, own
    if not GREEDY:
        row = tl.load(rows + own)
    i = segment * SEGMENT + tl.arange(0, SEGMENT)
    x = tl.load(logits + row * stride + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
    best = tl.max(x, 0)
    broken = tl.sum((x != x).to(tl.int32), 0) > 0
    tl.store(bests + at, tl.where(broken, float("nan"), best))
    tl.store(best_ids + at, tl.min(tl.where(x == best, i, vocab - 1), 0))
    if GREEDY:
        return
    most = tl.load(top_k + own)
    if most == 1:
        return
    degree = load_temperature(temperature, own, LEAST)
    x, top = tl.div_rn(x, tl.zeros([SEGMENT], tl.float32) + degree), tl.div_rn(best, degree)
    tl.store(masses + at, tl.sum(tl.where(x > float("-inf"), tl.exp(x - top), 0.0), 0))
    if has_filters(most, tl.load(top_p + own), tl.load(min_p + own), vocab):
        distance = tl.full([], FAR, tl.float32)
        near = x > top - distance
        count = tl.sum(near.to(tl.int32), 0)
        while count > COLLECTED:
            distance *= 0.5
            near = x > top - distance
            count = tl.sum(near.to(tl.int32), 0)
        tl.store(limits + at, top - distance)
        tl.store(counts + at, count)
        slot = tl.cumsum(near.to(tl.int32), 0) - 1
        tl.store(values + at * COLLECTED + slot, x, mask=near)
        tl.store(ids + at * COLLECTED + slot, i, mask=near)
        rest = tl.arange(0, COLLECTED)
        tl.store(values + at * COLLECTED + rest, float("-inf"), mask=rest >= count)


@triton.jit
def draw_any(logits, segment, there, masses, best, uniform, temperature, vocab, SEGMENT: tl.constexpr):
    """Draw from all tokens of a row: the token at which the running sum of weights exceeds a goal. masses: of segments,
    relative to the best token. Tokens of weight 0 are excluded by their weight, since sums in another order differ
    slightly."""
    sums, goal = tl.cumsum(masses, 0), uniform * tl.sum(masses, 0)
    holds = there & (masses > 0.0)
    chosen = tl.min(tl.where(holds & (sums > goal), segment, NONE), 0)
    chosen = tl.where(chosen == NONE, tl.max(tl.where(holds, segment, 0), 0), chosen)
    goal -= tl.sum(tl.where(segment < chosen, masses, 0.0), 0)
    i = chosen * SEGMENT + tl.arange(0, SEGMENT)
    weight = tl.exp(scaled(logits, i, vocab, temperature) - best)
    after = (weight > 0.0) & (tl.cumsum(weight, 0) > goal)
    token = tl.min(tl.where(after, i, NONE), 0)
    return tl.where(token == NONE, tl.max(tl.where(weight > 0.0, i, 0), 0), token)


@triton.jit
def near_mass(values, size, width, pitch, best, min_p, limit, BLOCK: tl.constexpr):
    """Return weight and number of the collected tokens above a limit that pass min_p."""
    weights = tl.zeros([BLOCK], tl.float32)
    counts = tl.zeros([BLOCK], tl.int32)
    for first in range(0, size, BLOCK):
        n = first + tl.arange(0, BLOCK)
        x = tl.load(values + n // width * pitch + n % width, mask=n < size, other=float("-inf"))
        weight = tl.exp(x - best)
        near = (x > limit) & (weight > 0.0) & (weight >= min_p)
        weights += tl.where(near, weight, 0.0)
        counts += near.to(tl.int32)
    return tl.sum(weights, 0), tl.sum(counts, 0)


@triton.jit
def draw_kernel(
    logits, rows, bests, best_ids, masses, limits, counts, values, ids, tokens, temperature, uniform, top_p, min_p,
    top_k, vocab, stride, segments, GREEDY: tl.constexpr, FAR: tl.constexpr, LEAST: tl.constexpr,
    SEGMENT: tl.constexpr, COLLECTED: tl.constexpr, SEGMENTS_PAD: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Take or draw a token of a row from what `collect_kernel` has written. Grid (n). `floor` is the lowest key that
    filters keep, `kept` the number of tokens with this key that they keep."""
    dependent_launch.begin(DEPENDENT)
    own = tl.program_id(0).to(tl.int64)
    segment = tl.arange(0, SEGMENTS_PAD)
    at, there = own * segments + segment, segment < segments
    each = tl.load(bests + at, mask=there, other=float("-inf"))
    broken = tl.sum((each != each).to(tl.int32), 0) > 0
    largest = tl.where(broken, float("nan"), tl.max(each, 0))
    first_best = tl.min(tl.where(there & (each == largest), tl.load(best_ids + at, mask=there, other=0), NONE), 0)
    if GREEDY:
        store_token(tokens, own, first_best, largest)
        return
    row, top_k = tl.load(rows + own), tl.load(top_k + own)
    if top_k == 1:
        store_token(tokens, row, first_best, largest)
        return
    temperature, uniform = load_temperature(temperature, own, LEAST), tl.load(uniform + own)
    top_p, min_p = tl.load(top_p + own), tl.load(min_p + own)
    best = tl.div_rn(largest, temperature)
    tops = tl.div_rn(each, tl.zeros([SEGMENTS_PAD], tl.float32) + temperature)
    masses = tl.load(masses + at, mask=there, other=0.0)
    masses = tl.where(tops > float("-inf"), masses * tl.exp(tops - best), 0.0)
    logits += row * stride
    if not has_filters(top_k, top_p, min_p, vocab):
        token = draw_any(logits, segment, there, masses, best, uniform, temperature, vocab, SEGMENT)
        store_token(tokens, row, token, largest)
        return

    limit = tl.maximum(best - FAR, tl.max(tl.load(limits + at, mask=there, other=float("-inf")), 0))
    collected = tl.where(tops > limit, tl.load(counts + at, mask=there, other=0), 0)
    width = tl.maximum(tl.max(collected, 0), 1)  # read as many places of each segment as the fullest one needs
    mass, count = near_mass(
        values + own * segments * COLLECTED, segments * width, width, COLLECTED, best, min_p, limit, BLOCK
    )  # fmt: skip
    any_k, all_pass = top_k >= vocab, min_p > tl.exp(limit - best)  # whether all that pass min_p are collected
    all_mass = tl.where(all_pass, mass, tl.sum(masses, 0))
    enough = all_pass | (top_k <= count) | (any_k & (min_p <= 0.0) & (mass >= top_p * all_mass))
    narrow = enough & (mass > 0.0)
    whole_vocab, pitch = vocab, COLLECTED
    if narrow:
        logits = values + own * segments * COLLECTED
        vocab = segments * width
        temperature = tl.full([], 1.0, tl.float32)
    else:
        width, pitch = vocab, vocab

    floor = sort_key(best - 110.0)  # weights of lower keys are 0 in float32
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
    target = tl.minimum(uniform * total, (total.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True))
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


def sample_rows(logits: Tensor, random: list[RandomRows]) -> Tensor:
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if sum(len(group.rows) for group in random) < len(logits):
        sample(logits, None, tokens)
    for group in random:
        sample(logits, group, tokens)
    return tokens


def sample(logits: Tensor, group: RandomRows | None, tokens: Tensor) -> None:
    """Sample a token for each row of a group; rows with a top_k of 1 are greedy. group: None for all rows, greedily."""
    count, vocab = len(logits) if group is None else len(group.rows), logits.shape[1]
    segments = triton.cdiv(vocab, SEGMENT)

    def empty(dtype: torch.dtype, *sizes: int) -> Tensor:
        return torch.empty(count, segments, *sizes, dtype=dtype, device=logits.device)

    bests, best_ids = empty(torch.float32), empty(torch.int32)
    temperature = uniform = top_p = min_p = masses = limits = values = bests  # not used
    rows, counts, ids, top_k = tokens, best_ids, best_ids, best_ids
    if group is not None:
        rows, temperature, uniform = group.rows, group.temperature, group.uniform
        top_p, min_p, top_k = group.top_p, group.min_p, group.top_k
        masses, limits, counts = empty(torch.float32), empty(torch.float32), empty(torch.int32)
        values, ids = empty(torch.float32, COLLECTED), empty(torch.int32, COLLECTED)
    options = {"GREEDY": group is None, "FAR": FAR, "LEAST": MIN_TEMPERATURE, "SEGMENT": SEGMENT,
               "COLLECTED": COLLECTED, **dependent_launch.options(logits.device)}  # fmt: skip
    collect_kernel[count, segments](
        logits, rows, temperature, top_p, min_p, top_k, bests, best_ids, masses, limits, counts, values, ids, vocab,
        logits.stride(0), num_warps=8, **options,
    )  # fmt: skip
    draw_kernel[count,](
        logits, rows, bests, best_ids, masses, limits, counts, values, ids, tokens, temperature, uniform, top_p, min_p,
        top_k, vocab, logits.stride(0), segments, SEGMENTS_PAD=triton.next_power_of_2(segments), BLOCK=BLOCK,
        num_warps=16, **options,
    )  # fmt: skip
