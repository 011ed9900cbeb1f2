"""What requests have cost, over HTTP and a real engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from openai import AsyncOpenAI

from cluster.config.ingress_section import IngressSection
from cluster.config.model_section import ModelSection
from cluster.model_info import model_info
from deployments.frontend.api_keys import key_line
from deployments.http.middleware import AuthConfig
from tests.deployments.real_api import RealApi, real_api, real_api_with_prefill

ASKED: Any = {"model": "tiny", "prompt": "The fox jumps over the lazy dog", "temperature": 0.0, "max_tokens": 12}
COST: Any = {"usage": {"include": True}, "ignore_eos": True}


def openai_client(api: RealApi) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{api.client.base_url}/v1", api_key="none", max_retries=0)


def cost_of(usage: Any) -> dict[str, float]:
    return dict(usage.model_dump()["cost_details"])


@pytest.mark.parametrize("stop", [None, "first"], ids=["to the end", "to a stop string"])
async def test_a_client_that_asks_is_told_the_cost_of_its_answer_and_no_other_client_is(folder, stop):
    async with real_api(folder) as api, openai_client(api) as client:
        silent = await client.completions.create(**ASKED)
        assert "cost_details" not in silent.usage.model_dump()
        text = silent.choices[0].text
        more = {"stop": next(c for c in text[1:] if c.isascii())} if stop else {}
        whole = await client.completions.create(**ASKED, **more, extra_body=COST)
        stream = await client.completions.create(**ASKED, **more, stream=True, extra_body=COST)
        *_, last = [chunk async for chunk in stream]
        for cost in (cost_of(whole.usage), cost_of(last.usage)):
            assert cost["compute_seconds"] > 0 < cost["kv_gib_seconds"]
            assert cost["wasted_seconds"] == 0
        told = cost_of(whole.usage)["compute_seconds"] + cost_of(last.usage)["compute_seconds"]
        times = await api.scrape_when(lambda s: s.sum("manta_engine_seconds_total", spent_on="requests") >= told)
        assert times.sum("manta_engine_kv_gib_seconds_total") > 0


async def test_an_answer_that_is_sent_again_tells_what_it_had_cost(folder):
    async with real_api(folder) as api:
        headers = {"Idempotency-Key": "once"}
        first, again = [await api.complete(headers, **ASKED, **COST) for _ in range(2)]
        assert first["usage"]["cost_details"]["compute_seconds"] > 0
        assert again == first


async def test_the_cost_of_a_prompt_includes_the_engine_that_computed_it(folder):
    async with real_api_with_prefill(folder) as api:
        answer = await api.complete(**{**ASKED, "prompt": "a b c " * 40}, **COST)
        timeline = (await api.client.get(f"/debug/requests/{answer['id']}")).json()["sequences"][0]
        (cost,) = timeline["costs"].values()
        assert cost["compute_s"] == answer["usage"]["cost_details"]["compute_seconds"]
        scrape = await api.scrape_when(lambda s: s.sum("manta_engine_requests_ended_total", engine="decode-1") == 1)
        assert cost["compute_s"] > scrape.sum("manta_engine_seconds_total", engine="decode-1", spent_on="requests")


async def test_prices_turn_costs_into_money_in_answers_and_metrics(folder):
    section = ModelSection(name="tiny", model=str(folder), prices={"engine_hour": 3600.0})
    info = replace(model_info(section, IngressSection()), identity=None)
    auth = AuthConfig(api_keys=(key_line("alice", "sk-alice"),), admin_keys=("alice",))
    async with real_api(folder, info=info, auth=auth) as api:
        api.client.headers["authorization"] = "Bearer sk-alice"
        answer = await api.complete(**ASKED, n=2, **COST)
        usage = answer["usage"]
        timelines = (await api.client.get(f"/debug/requests/{answer['id']}")).json()["sequences"]
        assert sum(timeline["price"] for timeline in timelines) == pytest.approx(usage["cost"])
        assert usage["cost"] == pytest.approx(usage["cost_details"]["compute_seconds"]) and usage["cost"] > 0
        found = await api.scrape_when(lambda s: s.sum("manta_key_output_tokens_total") > 0)
        assert found.sum("manta_key_output_tokens_total", key="alice") == usage["completion_tokens"]
        assert found.sum("manta_key_prompt_tokens_total", key="alice") == usage["prompt_tokens"]
        assert found.sum("manta_key_cost_total", key="alice") == pytest.approx(usage["cost"])
