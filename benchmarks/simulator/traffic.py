"""Requests that fit into the bundled model's context, and how many of them an engine takes."""

from __future__ import annotations

import numpy as np

from cluster.lab.simulator.cost_model import CostModel
from cluster.lab.simulator.trace import PIECE, Trace, lognormal, make_trace

BATCH = 16  # sequences of an engine that is called full


def small_trace(requests: int, rate: float, seed: int) -> Trace:
    """Conversations as short as the bundled model's context asks for: 190 tokens in and 55 out on average."""
    arrivals = make_trace("fixed", requests, rate, seed=seed).arrivals_s
    rng = np.random.default_rng(seed)
    return Trace("small", arrivals, lognormal(rng, requests, 150, 190, 900), lognormal(rng, requests, 40, 55, 200))


def grouped_trace(requests: int, rate: float, seed: int, groups: int) -> Trace:
    """The same behind one of `groups` prefixes of PIECE tokens each, drawn evenly."""
    own = small_trace(requests, rate, seed)
    lengths = np.minimum(own.prompt_tokens, PIECE)
    group = np.random.default_rng([seed, 1]).integers(groups, size=requests)
    ids = [[int(group[i]), groups + i] for i in range(requests)]
    return Trace("grouped", own.arrivals_s, PIECE + lengths, own.output_tokens, ids)


def capacity(cost: CostModel, trace: Trace) -> float:
    """Requests per second of one engine that is always full, roughly."""
    prompt, output = float(trace.prompt_tokens.mean()), float(trace.output_tokens.mean())
    step = cost.seconds(BATCH, BATCH, int(BATCH * prompt), int(BATCH * prompt))
    prefill = cost.seconds(int(prompt), 1, int(prompt * prompt / 2), int(prompt))
    return 1 / (prefill + output * step / BATCH)
