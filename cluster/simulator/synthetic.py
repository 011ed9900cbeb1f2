"""Traces drawn from published figures. Equal arguments give equal traces.

Lengths are log-normal, by median and mean: sigma = sqrt(2 ln(mean / median)). What the figures are:

azure-conversation, azure-code: Azure's LLM traces of 2023. Medians from Splitwise (arXiv:2311.18677, section 3):
    prompts of 1,020 and 1,500 tokens, answers of 129 and 13. Means of the published files: 1,155 and 2,048 in, 211 and
    28 out. Nothing is known of shared prefixes. What of these figures was looked up again: docs/simulator.md.
mooncake: conversations of Kimi (arXiv:2407.00079, section 4.2): 7,590 tokens in and 182 out on average, and a large
    cache has half of all blocks. Which turn follows which was not published in words; here a session draws one of a few
    system prompts by Zipf's law, and each turn appends the last answer and a new question, so that prompts grow as
    those do.
shared-prefix: groups of prompts with one long beginning each, as SGLang's benchmark of its cache-aware router has them.
fixed: all the same, as in the first figure of DistServe (arXiv:2401.09670): 512 in, 64 out.

Arrivals: gaps from a gamma distribution, which is how BurstGPT (arXiv:2401.17644) describes measured traffic; a
burstiness of 1 is a Poisson process, below 1 requests come in bursts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count

import numpy as np

from cluster.cli.bench.arrivals import arrival_times
from cluster.simulator.trace import PIECE, Counts, Times, Trace
from engine.errors import InvalidParameter

Random = np.random.Generator


def make_trace(name: str, requests: int, rate: float, *, burstiness: float = 1.0, seed: int = 0) -> Trace:
    """rate: requests per second. Raises InvalidParameter."""
    if name not in KINDS:
        raise InvalidParameter("trace", name, f"a file, or one of {', '.join(KINDS)}")
    if requests < 1:
        raise InvalidParameter("requests", requests, "at least 1")
    if not (rate > 0 and math.isfinite(rate)):
        raise InvalidParameter("rate", rate, "above 0 and finite")
    if not burstiness > 0:
        raise InvalidParameter("burstiness", burstiness, "above 0")
    arrivals = np.array(arrival_times(requests, rate, burstiness, seed))
    return KINDS[name](arrivals, np.random.default_rng([seed, 1]))


def lognormal(random: Random, size: int, median: float, mean: float, longest: int) -> Counts:
    """Whole numbers from 1 to `longest`."""
    sigma = math.sqrt(2 * math.log(mean / median))
    return np.clip(np.rint(random.lognormal(math.log(median), sigma, size)), 1, longest).astype(np.int64)


def fixed(prompt: int, output: int, arrivals: Times) -> Trace:
    size = len(arrivals)
    return Trace("fixed", arrivals, np.full(size, prompt), np.full(size, output))


def shared_prefix(
    arrivals: Times, random: Random, *, groups: int, system: int, question: int, output: int, turns: int = 0
) -> Trace:
    """Every request begins with the system prompt of one of `groups` groups, drawn evenly; `system` in whole pieces.

    turns: if given, each group has exactly so many requests, in random order.
    """
    size, pieces = len(arrivals), system // PIECE
    group = random.integers(groups, size=size) if not turns else random.permutation(np.arange(size) % groups)
    rest = -(-question // PIECE)
    ids = [
        [int(group[i]) * pieces + j for j in range(pieces)] + [groups * pieces + i * rest + j for j in range(rest)]
        for i in range(size)
    ]
    return Trace("shared-prefix", arrivals, np.full(size, pieces * PIECE + question), np.full(size, output), ids)


def _azure(name: str, prompt: tuple[float, float, int], output: tuple[float, float, int]) -> Callable[..., Trace]:
    def draw(arrivals: Times, random: Random) -> Trace:
        size = len(arrivals)
        return Trace(name, arrivals, lognormal(random, size, *prompt), lognormal(random, size, *output))

    return draw


SYSTEM_PROMPTS, ZIPF = 40, 1.5
SYSTEM_PIECES = (1, 6)  # how long a system prompt may be
MORE_TURNS = 0.48  # chance that a session goes on
THINK_S = 60.0  # mean time until a user's next turn
FIRST = (2500.0, 4900.0, 100_000)  # median and mean of what a user brings first: often a document
NEXT = (420.0, 1300.0, 30_000)
ANSWER = (120.0, 182.0, 2_000)
LONGEST = 120_000


def _mooncake(arrivals: Times, random: Random) -> Trace:
    """Every arrival is the next turn of the session that is due for one, or the first turn of a new one."""
    weights = 1 / np.arange(1, SYSTEM_PROMPTS + 1) ** ZIPF
    ids = count()
    systems = [[next(ids) for _ in range(random.integers(*SYSTEM_PIECES))] for _ in range(SYSTEM_PROMPTS)]
    size = len(arrivals)
    outputs = lognormal(random, size, *ANSWER)
    firsts, nexts = lognormal(random, size, *FIRST), lognormal(random, size, *NEXT)
    chosen = random.choice(SYSTEM_PROMPTS, size, p=weights / weights.sum())
    goes_on, waits = random.random(size) < MORE_TURNS, random.exponential(THINK_S, size)
    due: list[tuple[float, int, list[int], int]] = []  # when a session goes on, its pieces and tokens
    prompts, hash_ids = np.zeros(size, dtype=np.int64), []
    for i, now in enumerate(arrivals):
        if due and due[0][0] <= now:
            _, _, pieces, tokens = heapq.heappop(due)
            tokens += int(nexts[i])
        else:
            pieces = systems[chosen[i]]
            tokens = len(pieces) * PIECE + int(firsts[i])
        # only whole pieces stay what they are when the text goes on
        pieces = [*pieces, *(next(ids) for _ in range(-(-tokens // PIECE) - len(pieces)))]
        prompts[i] = tokens
        hash_ids.append(pieces)
        after = tokens + int(outputs[i])
        if goes_on[i] and after < LONGEST:
            heapq.heappush(due, (now + waits[i], i, pieces[: tokens // PIECE], after))
    return Trace("mooncake", arrivals, prompts, outputs, hash_ids)


KINDS: dict[str, Callable[[Times, Random], Trace]] = {
    "azure-conversation": _azure("azure-conversation", (1020, 1155, 14_000), (129, 211, 2_000)),
    "azure-code": _azure("azure-code", (1500, 2048, 14_000), (13, 28, 2_000)),
    "mooncake": _mooncake,
    "shared-prefix": lambda arrivals, random: shared_prefix(
        arrivals, random, groups=64, system=2048, question=128, output=256
    ),
    "fixed": lambda arrivals, _: fixed(512, 64, arrivals),
}
