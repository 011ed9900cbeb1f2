from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import astuple, replace

import numpy as np
import pytest

from benchmarks.simulator.http_calibration import (
    BACKGROUND,
    BESIDE,
    PROMPTS,
    HttpFit,
    Observation,
    Probe,
    first_token_beside,
    fit_observations,
    main,
    observations,
    observe,
    probes,
    write_cost,
)
from cluster.cli.bench.openai_client import OpenAIClient, RequestResult, StreamChunk
from cluster.lab.simulator.cluster import Cluster
from cluster.lab.simulator.cost_model import LinearCostModel, Measured, read_cost
from cluster.lab.simulator.spec import ClusterSpec
from cluster.lab.simulator.trace import Trace
from engine.errors import EngineUnavailable, RequestError
from tests.cluster.cli.bench.fake_openai_server import FakeOpenAIServer
from tests.cluster.lab.simulator.small_cluster import small_cluster

COST = LinearCostModel(step_s=1.5e-3, token_s=5e-5, sequence_s=1.5e-4, pair_s=5e-8, context_s=1e-7)
REQUEST_S, BUDGET = 7e-3, 512


def real_cluster(replicas: int, *, apart: bool = False) -> ClusterSpec:
    """A simulated cluster, which takes exactly these times."""
    spec = small_cluster(replicas=replicas, router="round_robin", max_num_seqs=64, max_num_batched_tokens=BUDGET)
    spec = replace(spec, prefill_replicas=replicas if apart else 0, cost=COST, handoff_s=0.0, bytes_per_s=1e12)
    return spec.with_request(REQUEST_S)


def seen(probe: Probe, spec: ClusterSpec) -> list[Observation]:
    size = probe.streams
    trace = Trace("probe", np.ones(size), np.full(size, probe.prompt), np.full(size, probe.output))
    cluster = Cluster(spec, trace)
    cluster.run()
    step_ms = cluster.report().itl_p50_ms
    assert step_ms is not None
    return observations(probe, BUDGET, (cluster.results.first_at - 1).tolist(), [step_ms / 1000])


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_cost_is_found_again_from_what_clients_see(replicas):
    spec = real_cluster(replicas)
    found = fit_observations([each for probe in probes(replicas) for each in seen(probe, spec)])
    assert found.error < 0.01
    assert found.request_s == pytest.approx(REQUEST_S, rel=0.1)
    for work in [(1, 1, 100, 100), (16, 16, 4000, 4000), (300, 1, 45_000, 300), (310, 11, 48_000, 3300)]:
        assert found.cost.seconds(*work) == pytest.approx(COST.seconds(*work), rel=0.05)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("prompt", [64, 900])
def test_prompts_beside_streams_wait_for_steps_as_is_taken_for_granted(prompt, apart):
    """The mean over prompts that come at moments that have nothing to do with steps."""
    count, begin = 60, BACKGROUND // 4  # while the streams have their middle tokens
    waits = np.random.default_rng(0).random(count)
    first_s = []
    for wait in waits:
        arrivals = np.array([1.0] * BESIDE + [1.0 + begin * 1.8e-3 + 0.1 * wait])
        lengths, outputs = np.array([16] * BESIDE + [prompt]), np.array([BACKGROUND] * BESIDE + [1])
        cluster = Cluster(real_cluster(1, apart=apart), Trace("beside", arrivals, lengths, outputs))
        cluster.run()
        first_s.append(cluster.results.first_at[-1] - arrivals[-1])
    features = first_token_beside(prompt, BUDGET, 1, apart)
    request_s = REQUEST_S + (REQUEST_S / 2 if apart else 0)  # the prompt is sent on to another replica
    expected = request_s + features[2] * COST.step_s + COST.seconds(*features[3:]) - COST.step_s
    assert np.mean(first_s) == pytest.approx(expected, rel=0.03)


def test_what_replicas_take_from_each_other_is_found_again():
    slow = 1.4
    found = []
    for probe in probes(2):
        for each in observations(probe, BUDGET, [1.0], [1.0]):
            features, factor = each.features, slow if each.others else 1.0
            seconds = REQUEST_S * features[0] + factor * (COST.seconds(*features[3:]) + (features[2] - 1) * COST.step_s)
            found.append(Observation(features, float(seconds), each.others))
    for prompt in PROMPTS:
        features = first_token_beside(prompt, BUDGET, 2, False)
        steps_s = COST.seconds(*features[3:]) + (features[2] - 1) * COST.step_s
        found.append(Observation(features, float(REQUEST_S + 2 * 1e-3 + slow * steps_s), 1))
    fit = fit_observations(found)
    assert (fit.contention, fit.busy_s, fit.request_s) == pytest.approx((0.4, 1e-3, REQUEST_S), rel=1e-3)
    assert astuple(fit.cost) == pytest.approx(astuple(COST), rel=1e-3)


class ScriptedClient(OpenAIClient):
    """The client of a cluster that takes `first_s` to any first token, and `gap_s` to each of the others."""

    def __init__(self, first_s: float, gap_s: float):
        self.base_url = "http://scripted"
        self.prompts: list[tuple[int, ...]] = []
        self._first_s, self._gap_s = first_s, gap_s

    async def send(self, path: str, body: bytes) -> RequestResult:
        asked = json.loads(body)
        self.prompts.append(tuple(asked["prompt"]))
        tokens = asked["max_tokens"]
        return RequestResult(output_tokens=tokens, ttft_s=self._first_s, itl_s=[self._gap_s] * (tokens - 1))

    async def chunks(self, path: str, body: bytes) -> AsyncGenerator[StreamChunk]:
        asked = json.loads(body)
        self.prompts.append(tuple(asked["prompt"]))
        for _ in range(asked["max_tokens"]):
            yield StreamChunk()


def test_every_probe_has_prompts_that_are_in_no_cache():
    client = ScriptedClient(0.01, 0.002)
    found = asyncio.run(observe(client, "model", 2, BUDGET, rounds=3))
    each_round = sum(probe.streams for probe in probes(2)) + 2 * BESIDE + len(PROMPTS)
    assert len(client.prompts) == len(set(client.prompts)) == 3 * each_round
    for observation in found:
        assert observation.seconds == pytest.approx(0.01 if observation.features[0] else 0.002)


def test_a_server_that_streams_many_tokens_at_a_time_cannot_be_fitted():
    with pytest.raises(RequestError, match="several tokens at a time"):
        asyncio.run(observe(ScriptedClient(0.01, 0.0), "model", 1, BUDGET))


def test_what_http_takes_is_in_the_file_and_goes_both_ways(tmp_path):
    file = tmp_path / "cost.json"
    write_cost(HttpFit(COST, REQUEST_S, busy_s=0.0, contention=0.5, times=32, error=0.01), file)
    measured = read_cost(file)
    assert measured == Measured(COST, REQUEST_S)
    spec = small_cluster().with_request(REQUEST_S)
    assert spec.call_s + spec.token_s == pytest.approx(REQUEST_S)


def test_a_cluster_that_fails_a_probe_is_not_fitted(tmp_path):
    server, file = FakeOpenAIServer(), tmp_path / "cost.json"
    server.fails = True
    try:
        with pytest.raises(EngineUnavailable):
            main(file, server.url)
    finally:
        server.close()
    assert not file.exists()
