"""Metrics, log and traces of a real `serve run` with two ingresses."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.scrape import Scrape
from tests.serve.idle import is_idle
from tests.serve.serve_run import ServeRun, wait_until

pytestmark = pytest.mark.serve

NUM_REQUESTS = 12


def scrape(server: ServeRun) -> Scrape:
    return Scrape(httpx.get(f"{server.url}/metrics", timeout=60).text)


def complete(server: ServeRun, name: str, **body: object) -> dict:
    body = {"temperature": 0, "ignore_eos": True, "prompt": "The fox", **body}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"X-Request-Id": name}, timeout=30)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_any_ingress_tells_the_counts_of_all_of_them_and_of_the_engine(server):
    text = complete(server, "count-first", max_tokens=5)["choices"][0]["text"]
    stop = next(character for character in text[1:] if character.isascii())
    complete(server, "count-stop", max_tokens=400, stop=stop)
    wait_until(lambda: is_idle(server))
    before = scrape(server)  # other tests have counted, too; now all series are there
    usage = [complete(server, f"count-{i}", max_tokens=5)["usage"] for i in range(NUM_REQUESTS)]
    complete(server, "count-end", max_tokens=400, stop=stop)
    total = NUM_REQUESTS + 1

    def gained(found: Scrape, name: str, **labels: str) -> float:
        return found.sum(name, **labels) - before.sum(name, **labels)

    wait_until(lambda: gained(scrape(server), "manta_engine_requests_ended_total") == total)
    for _ in range(6):  # the ingresses take turns, more or less
        found = scrape(server)
        assert gained(found, "vllm:request_success_total", finished_reason="length") == NUM_REQUESTS
        assert gained(found, "vllm:request_success_total", finished_reason="stop") == 1
        assert gained(found, "manta_engine_requests_ended_total", reason="stop") == 1
        assert gained(found, "vllm:prompt_tokens_total") == total * usage[0]["prompt_tokens"]
        assert gained(found, "vllm:time_to_first_token_seconds_count") == total
        assert gained(found, "vllm:e2e_request_latency_seconds_count") == total
        assert gained(found, "http_requests_total", handler="/v1/completions", status="2xx") == total
        assert len({one.labels["ingress"] for one in found.series if "ingress" in one.labels}) == 2


def test_any_ingress_shows_what_all_of_them_have_billed_also_of_clients_that_have_left(server):
    def billed() -> dict:
        return dict(httpx.get(f"{server.url}/console/costs", timeout=60).json()["by_model"][0]["used"])

    told = [complete(server, f"cost-{i}", max_tokens=5, usage={"include": True})["usage"] for i in range(6)]
    assert all(usage["cost_details"]["compute_seconds"] > 0 for usage in told)
    wait_until(lambda: is_idle(server))
    before = billed()
    body = {"prompt": "The", "max_tokens": 500, "ignore_eos": True, "stream": True}
    for _ in range(4):
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
            next(answer.iter_lines())
    wait_until(lambda: billed()["sequences"] == before["sequences"] + 4)
    assert billed()["compute_s"] > before["compute_s"]
    assert before["compute_s"] >= 0.999 * sum(usage["cost_details"]["compute_seconds"] for usage in told)
    found = [httpx.get(f"{server.url}/console/costs", timeout=60).json() for _ in range(6)]
    assert len({costs["by_model"][0]["used"]["compute_s"] for costs in found}) == 1, "the ingresses take turns"
    assert all(sum(hour["seconds"]["idle"] for hour in costs["engines"]) > 0 for costs in found)


def test_gauges_are_back_to_zero_after_clients_have_left(server):
    body = {"prompt": "The", "max_tokens": 500, "ignore_eos": True, "stream": True}
    complete(server, "gauge", max_tokens=1)
    wait_until(lambda: is_idle(server))
    before = scrape(server)
    for _ in range(10):
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
            next(answer.iter_lines())
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    wait_until(lambda: all(scrape(server).sum(gauge) == 0 for gauge in gauges))
    ended = "vllm:request_success_total"
    wait_until(lambda: scrape(server).sum(ended) == before.sum(ended) + 10)
    assert scrape(server).sum(ended, finished_reason="error") == before.sum(ended, finished_reason="error")


def test_each_event_of_a_request_is_a_json_line_with_its_id_in_every_process(server):
    complete(server, "life", max_tokens=3)
    wait_until(lambda: len(lines_about(server, "cmpl-life-")) >= 5)
    lines = lines_about(server, "cmpl-life-")
    events = {(line["process"].split("-")[0], " ".join(line["message"].split()[:2])) for line in lines}
    assert events == {
        ("ingress", "request sent"),
        ("decode", "request queued"),
        ("decode", "request scheduled"),
        ("decode", "request ended"),
        ("ingress", "request ended"),
    }
    assert len({line["request_id"] for line in lines}) == 1
    (end,) = [line for line in lines if "seconds" in line]
    assert (end["reason"], end["output_tokens"]) == ("length", 3)


def lines_about(server: ServeRun, request_id: str) -> list[dict]:
    lines = [json.loads(line[line.index("{") :]) for line in server.worker_lines() if '"process":' in line]
    return [line for line in lines if str(line.get("request_id", "")).startswith(request_id)]


def test_a_request_is_traced_from_the_ingress_to_the_engine(server, receiver):
    complete(server, "traced", max_tokens=3)

    def spans() -> list:
        wanted = [
            s for s in receiver.spans if str(s.attributes.get("manta.sequence.id", "")).startswith("cmpl-traced-")
        ]
        return [span for span in receiver.spans if wanted and span.trace_id == wanted[0].trace_id]

    wait_until(lambda: len(spans()) == 5)
    names = {span.name.partition(" ")[0] for span in spans()}  # a method with its route, an operation with its model
    assert names == {"POST", "text_completion", "queue", "prefill", "decode"}
