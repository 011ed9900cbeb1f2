"""What /metrics says after requests that are known, to a real engine over real HTTP."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics

from deployments.http.server_header import NODE_HEADER
from deployments.observability.prometheus import Metrics
from deployments.observability.stats import IngressStats
from tests.deployments.fake_api import fake_api, says, until
from tests.deployments.real_api import BLOCK_SIZE, RealApi, real_api, real_api_with_prefill
from tests.scrape import Scrape

IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


def ended(scrape: Scrape) -> dict[str, float]:
    """Requests by the reason that their clients saw."""
    reasons = ("stop", "length", "abort", "error")
    return {reason: scrape.sum("vllm:request_success_total", finished_reason=reason) for reason in reasons}


def seen_by_engine(scrape: Scrape, *reasons: str) -> float:
    names = {one.labels["reason"] for one in scrape.series if one.name == "manta_engine_requests_ended_total"}
    return sum(scrape.sum("manta_engine_requests_ended_total", reason=reason) for reason in names & set(reasons))


def count(scrape: Scrape, name: str) -> tuple[float, float]:
    """How many values a histogram has, and their sum."""
    assert scrape.sum(f"{name}_bucket", le="+Inf") == scrape.sum(f"{name}_count")
    return scrape.sum(f"{name}_count"), scrape.sum(f"{name}_sum")


def is_idle(scrape: Scrape) -> bool:
    return all(scrape.sum(name) == 0 for name in IDLE)


async def known_workload(api: RealApi) -> str:
    """Four sequences: 7 + 4 + 4 + 1 tokens for prompts of 5, 3, 3 and 2. Returns the text of the first."""
    first = await api.complete(prompt=[5, 6, 7, 8, 9], max_tokens=7)
    await api.complete(prompt=[50, 51, 52], n=2, max_tokens=4)
    await api.complete(prompt=[80, 81], max_tokens=400, logit_bias={"70": 100}, stop_token_ids=[70])
    text: str = first["choices"][0]["text"]
    return text


async def test_counts_and_sums_are_exact_after_a_known_workload(folder):
    async with real_api(folder) as api:
        await known_workload(api)
        assert (await api.client.post("/v1/completions", json={"prompt": ""})).status_code == 400
        scrape = await api.scrape_when(lambda scrape: seen_by_engine(scrape, "stop", "length") == 4)
        assert ended(scrape) == {"stop": 1, "length": 3, "abort": 0, "error": 0}
        assert scrape.sum("vllm:prompt_tokens_total", model_name="tiny", engine="decode-1") == 5 + 3 + 3 + 2
        assert scrape.sum("vllm:generation_tokens_total") == 7 + 4 + 4 + 1
        assert scrape.sum("vllm:prefix_cache_queries_total") == 13
        assert scrape.sum("vllm:prefix_cache_hits_total") == 0
        assert count(scrape, "vllm:request_prompt_tokens") == (4, 13)
        assert count(scrape, "vllm:request_generation_tokens") == (4, 16)
        assert count(scrape, "vllm:request_params_n") == (3, 1 + 2 + 1)
        assert count(scrape, "vllm:request_params_max_tokens") == (4, 7 + 4 + 4 + 400)
        assert count(scrape, "vllm:inter_token_latency_seconds")[0] == 6 + 3 + 3 + 0
        assert count(scrape, "vllm:request_time_per_output_token_seconds")[0] == 3
        # the last token of a sequence is never computed on
        assert count(scrape, "vllm:iteration_tokens_total")[1] == (5 + 6) + 2 * (3 + 3) + 2
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_inference_time"):
            assert count(scrape, f"vllm:{name}_seconds")[0] == 4
        answers = {"handler": "/v1/completions", "method": "POST", "ingress": "ingress-1"}
        assert scrape.sum("http_requests_total", status="2xx", **answers) == 3
        assert scrape.sum("http_requests_total", status="4xx", **answers) == 1
        assert scrape.sum("manta_http_responses_total", status="400", **answers) == 1
        assert scrape.sum("http_request_duration_seconds_count", **answers) == 4
        assert scrape.sum("vllm:cache_config_info", block_size="4", num_gpu_blocks="512") == 1
        assert is_idle(scrape)


async def test_a_scrape_of_one_node_has_the_engines_and_ingresses_of_that_node_only(folder):
    async with real_api(folder) as api:
        await api.complete(prompt=[5, 6], max_tokens=2)
        await api.scrape_when(lambda scrape: seen_by_engine(scrape, "length") == 1)
        whole, here, elsewhere = [
            Scrape((await api.client.get(path, headers=headers)).text)
            for path, headers in (("/metrics", {}), ("/metrics/node", {}), ("/metrics/node", {NODE_HEADER: "b"}))
        ]
        assert {one.name for one in here.series} == {one.name for one in whole.series}
        assert not [one for one in elsewhere.series if {"engine", "ingress"} & one.labels.keys()]
        assert (here.sum("manta_up"), elsewhere.sum("manta_up")) == (1, 0)


async def test_times_have_the_names_of_opentelemetry_by_operation(folder):
    async with real_api(folder) as api:
        await known_workload(api)
        scrape = await api.scrape()
        named = {name: name.replace(".", "_") + "_seconds" for name in (
            gen_ai_metrics.GEN_AI_SERVER_REQUEST_DURATION,
            gen_ai_metrics.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN,
            gen_ai_metrics.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN,
        )}  # fmt: skip
        counts = [count(scrape, name)[0] for name in named.values()]
        assert counts == [4, 4, 3], "one of them had one token"
        labels = {"gen_ai_operation_name": "text_completion", "gen_ai_provider_name": "manta"}
        assert all(scrape.sum(f"{name}_count", **labels) for name in named.values())
        assert scrape.sum("gen_ai_server_request_duration_seconds_count", gen_ai_request_model="tiny") == 4


async def test_parts_of_the_time_of_requests_add_up(folder):
    async with real_api(folder) as api:
        await known_workload(api)
        scrape = await api.scrape_when(lambda scrape: seen_by_engine(scrape, "stop", "length") == 4)
        parts = {name: count(scrape, f"vllm:request_{name}_time_seconds")[1] for name in ("queue", "prefill", "decode")}
        inference = count(scrape, "vllm:request_inference_time_seconds")[1]
        assert parts["prefill"] + parts["decode"] == pytest.approx(inference)
        assert count(scrape, "vllm:inter_token_latency_seconds")[1] == pytest.approx(parts["decode"])
        whole = count(scrape, "vllm:e2e_request_latency_seconds")[1]
        assert sum(parts.values()) < whole
        assert count(scrape, "vllm:time_to_first_token_seconds")[1] < whole


async def test_a_stop_string_counts_as_stop_for_the_client_and_for_the_engine(folder):
    async with real_api(folder) as api:
        text = await known_workload(api)
        stop = next(character for character in text[1:] if character.isascii())
        answer = await api.complete(prompt=[5, 6, 7, 8, 9], max_tokens=400, stop=stop)
        assert answer["choices"][0]["finish_reason"] == "stop"
        scrape = await api.scrape_when(lambda scrape: seen_by_engine(scrape, "stop", "length", "abort") == 5)
        assert ended(scrape) == {"stop": 2, "length": 3, "abort": 0, "error": 0}
        assert seen_by_engine(scrape, "stop") == 2
        assert seen_by_engine(scrape, "abort") == 0
        assert is_idle(scrape)


async def test_gauges_are_back_to_zero_after_clients_have_left(folder):
    async with real_api(folder) as api:
        streams = [api.leave_a_stream(prompt=[5, 6, i], max_tokens=400) for i in range(20)]
        await asyncio.gather(*streams)
        scrape = await api.scrape_when(lambda scrape: seen_by_engine(scrape, "abort") == 20 and is_idle(scrape))
        assert ended(scrape) == {"stop": 0, "length": 0, "abort": 20, "error": 0}
        assert scrape.sum("manta_ingress_requests_waiting") == 0
        assert scrape.sum("manta_kv_blocks", state="running") == 0
        assert count(scrape, "vllm:time_to_first_token_seconds")[0] == 20
        assert count(scrape, "vllm:e2e_request_latency_seconds")[0] == 0


async def test_a_prompt_that_another_engine_computes_counts_once(folder):
    async with real_api_with_prefill(folder) as api:
        await api.complete(prompt=list(range(5, 45)), max_tokens=4)
        scrape = await api.scrape_when(lambda scrape: seen_by_engine(scrape, "length") == 1)
        assert ended(scrape) == {"stop": 0, "length": 1, "abort": 0, "error": 0}
        assert scrape.sum("vllm:prompt_tokens_total") == 40
        assert scrape.sum("vllm:generation_tokens_total") == 4
        assert count(scrape, "vllm:request_prefill_time_seconds")[0] == 1
        for of_both in ("vllm:kv_cache_usage_perc", "manta_images_encoded_total"):
            engines = {one.labels["engine"] for one in scrape.select(of_both, [])}
            assert engines == {"decode-1", "prefill-1"}


async def test_what_routers_count_is_told_apart_by_the_pool_that_they_send_to(folder):
    async with real_api_with_prefill(folder) as api:
        await api.complete(prompt=list(range(5, 45)), max_tokens=4)
        scrape = await api.scrape_when(lambda scrape: seen_by_engine(scrape, "length") == 1)
        remote_requests = {"model_name": "tiny", "engine": "decode-1", "pool": "prefill"}
        why = {"policy": "prefix_aware", "reason": "no_prefix"}
        assert scrape.sum("manta_routed_requests_total", **remote_requests) == 1
        assert scrape.sum("manta_routed_requests_total", **remote_requests, **why) == 1
        assert scrape.sum("manta_routing_drift_tokens_total", **remote_requests) == 0
        # this ingress has no router: it has its one engine at hand
        assert scrape.sum("manta_routed_requests_total", ingress="ingress-1", pool="decode") == 0
        assert scrape.sum("vllm:iteration_tokens_total_sum", engine="prefill-1") == 40
        checked = BLOCK_SIZE  # a block that came is computed again, by then or later
        assert scrape.sum("vllm:iteration_tokens_total_sum", engine="decode-1") in (3, 3 + checked)
        assert scrape.sum("manta_handoffs_total", result="received") == 1


async def test_a_request_that_its_engine_fails_counts_as_an_error():
    async with fake_api(says("abc"), max_replays=0) as api:
        api.engine.paused.set()
        asking = asyncio.create_task(api.post("completions", prompt="a"))
        async with asyncio.timeout(60):
            while not api.engine.num_live:
                await asyncio.sleep(0.005)
        api.replica.fail("rank 0 died")
        assert (await asking).status_code == 503
        scrape = Scrape((await api.client.get("/metrics")).text)
        assert scrape.sum("manta_up") == 0
        assert scrape.sum("vllm:request_success_total", finished_reason="error") == 1
        assert scrape.sum("http_requests_total", status="5xx") == 1


async def test_paths_and_methods_that_clients_make_up_add_no_series_of_their_own(api):
    for method, path in (("GET", "/a"), ("GET", "/b/c"), ("BREW", "/pot"), ("WHEN", "/pot")):
        await api.client.request(method, path)
    scrape = Scrape((await api.client.get("/metrics")).text)
    series = [one for one in scrape.series if one.name == "http_requests_total"]
    assert {(one.labels["handler"], one.labels["method"]) for one in series} == {
        ("none", "GET"),
        ("none", "other"),
    }
    assert scrape.sum("http_requests_total", status="4xx") == 4


async def test_a_request_that_somebody_else_cancels_counts_as_aborted_and_not_as_an_error(api):
    """This is what Serve does: when a client is gone, it cancels the call to the engine before it tells the ingress."""
    api.engine.paused.set()
    asking = asyncio.create_task(api.post("completions", prompt="a"))
    await until(lambda: api.engine.num_live == 1)
    (call,) = [task for task in asyncio.all_tasks() if task.get_coro().__qualname__ == "Sequence._generate"]
    call.cancel()
    assert (await asking).status_code == 500
    scrape = Scrape((await api.client.get("/metrics")).text)
    assert ended(scrape) == {"stop": 0, "length": 0, "abort": 1, "error": 0}


async def test_a_broken_hold_counts_once_however_many_ingresses_knew_of_it():
    class Ingresses:
        async def all_stats(self) -> list[IngressStats]:
            found = [IngressStats(name) for name in ("began first", "as early", "began later")]
            for ingress, broken in zip(found, (3, 3, 1), strict=True):
                ingress.model("tiny").routing.holds_broken = broken
            return found

    scrape = Scrape((await Metrics({}, Ingresses()).text()).decode())  # type: ignore[arg-type]
    assert scrape.sum("manta_holds_broken_total", model_name="tiny") == 3
