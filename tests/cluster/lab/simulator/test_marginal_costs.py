"""Whether the bill of a client is what the client adds to the time of an engine, without the noise of a machine.
`python -m benchmarks.costs` measures the same with a real model."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.costs import MIXES, SEQUENCES, B, Load
from cluster.lab.simulator.billing.meter import EngineMeter
from cluster.lab.simulator.cluster import Cluster
from cluster.lab.simulator.cost_model import CostModel, LinearCostModel, roofline
from cluster.lab.simulator.trace import Trace
from deployments.billing.prices import Prices
from engine.core.request import Request
from tests.cluster.lab.simulator.small_cluster import BLOCK, CARD, MODEL, small_cluster

CPU = LinearCostModel(step_s=0.003, token_s=0.0008, sequence_s=0.001, pair_s=1e-7, context_s=1e-6)
COSTS: dict[str, CostModel] = {"cpu": CPU, "gpu": roofline(MODEL, CARD)}


def trace_of(loads: Mapping[str, Load], seed: int) -> tuple[Trace, list[str]]:
    """All requests at once, in any order. Returns also the client of each."""
    requests = [(client, load) for client, load in loads.items() for _ in range(load.requests)]
    random.Random(seed).shuffle(requests)
    prompts, ids, new = [], [], 1000
    for _, load in requests:
        prompts.append(load.shared + load.prompt)
        own = -(-load.prompt // BLOCK)
        ids.append([*range(1, 1 + load.shared // BLOCK), *range(new, new + own)])
        new += own
    trace = Trace("clients", np.zeros(len(ids)), np.array(prompts), np.array([load.output for _, load in requests]),
                  ids, BLOCK)  # fmt: skip
    return trace, [client for client, _ in requests]


def compute(loads: Mapping[str, Load], cost: CostModel, seed: int) -> tuple[float, dict[str, float]]:
    """Return the seconds of all steps, and the bill of each client."""
    trace, clients = trace_of(loads, seed)
    options = {"max_num_seqs": SEQUENCES, "max_num_batched_tokens": 2048}
    spec = replace(small_cluster(replicas=1, num_blocks=4000, **options), cost=cost, prices=Prices(engine_hour=1.0))
    cluster, ended = Cluster(spec, trace), []
    record = cluster.results.ended
    cluster.results.ended = lambda request, late_s: (ended.append(request), record(request, late_s))  # type: ignore[method-assign, assignment]
    cluster.run()
    (replica,) = cluster.pools["decode"].replicas
    assert isinstance(replica.meter, EngineMeter)
    bills = dict.fromkeys(loads, 0.0)
    request: Request
    for request in ended:
        bills[clients[int(request.request_id)]] += replica.meter.ledger.of(request) / 1e9
    assert sum(bills.values()) == pytest.approx(replica.busy_s)
    return replica.busy_s, bills


@pytest.mark.parametrize(("cost", "error"), [("cpu", 0.03), ("gpu", 0.12)])
def test_a_client_pays_what_it_adds(cost, error):
    """On a GPU, a step of few tokens takes as long as reading the weights, so what is added depends on the order."""
    alone, _ = compute({"B": B}, COSTS[cost], 0)
    ratios = {}
    for name, mix in MIXES.items():
        both, bills = compute({"B": B, "A": mix}, COSTS[cost], 0)
        ratios[name] = bills["A"] / (both - alone)
    assert ratios == pytest.approx(dict.fromkeys(MIXES, 1.0), abs=error)
