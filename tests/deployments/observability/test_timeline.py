"""What an ingress and its engines tell of a request, without Ray."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from deployments.frontend import retry
from deployments.frontend.api_keys import hash_key
from deployments.http.middleware import AuthConfig
from deployments.observability.telemetry import NoPeers, Telemetry
from deployments.observability.timeline import MAX_ENDED, MAX_EVENTS, RequestTimelines, SequenceTimeline
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.timeline import TimelineEvent
from tests.deployments.fake_api import fake_api, until
from tests.deployments.openai.chat_models import QWEN, VOCAB_SIZE, chat_tokenizer
from tests.deployments.real_api import real_api_with_prefill
from tests.deployments.replicas.mortal_pool import Death, MortalPool, ingress, listen

ASKED = {"prompt": "A secret prompt", "max_tokens": 4}
OWN_ID = {"X-Request-Id": "mine-1"}


def timeline(request_id: str, arrived_at: float = 0.0, **fields: Any) -> SequenceTimeline:
    return SequenceTimeline(request_id=request_id, model="m", prompt_tokens=1, arrived_at=arrived_at, **fields)


async def told(client: httpx.AsyncClient, name: str) -> list[dict[str, Any]]:
    answer = await client.get(f"/debug/requests/{name}")
    assert answer.status_code == 200, answer.text
    sequences: list[dict[str, Any]] = answer.json()["sequences"]
    return sequences


def said(sequence: dict[str, Any], where: str) -> list[str]:
    return [event["what"] for event in sequence["events"] if event["where"] == where]


async def test_finished_request_is_told_under_every_name_that_clients_and_logs_know(api):
    headers = {"X-Request-Id": "mine/1"}
    answer = (await api.client.post("/v1/completions", json={**ASKED, "n": 2}, headers=headers)).json()
    assert answer["id"] == "cmpl-mine/1"
    first, second = names = [one["request_id"] for one in await told(api.client, "cmpl-mine/1")]
    assert [one["request_id"] for one in await told(api.client, "mine/1")] == names
    for name in (first, second):
        assert [one["request_id"] for one in await told(api.client, name)] == [name]


@pytest.mark.parametrize("route", ["/v1/messages", "/v1/chat/completions", "/v1/completions"])
async def test_a_request_is_told_under_its_clients_id_whatever_the_ids_of_its_route_begin_with(route):
    asked = {"prompt": "hi"} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    async with fake_api(text_model=chat_tokenizer(QWEN), vocab_size=VOCAB_SIZE) as api:
        answer = await api.client.post(route, json={"model": "fake", "max_tokens": 4, **asked}, headers=OWN_ID)
        assert answer.status_code == 200, answer.text
        assert len(await told(api.client, OWN_ID["X-Request-Id"])) == 1


async def test_timeline_has_the_numbers_and_events_of_a_request_and_not_its_text(api):
    name = (await api.post("completions", **ASKED)).json()["id"]
    answer = await api.client.get(f"/debug/requests/{name}")
    (one,) = answer.json()["sequences"]
    assert "secret" not in answer.text
    assert (one["state"], one["reason"], one["output_tokens"], one["engines"]) == (
        "ended",
        "length",
        4,
        ["fake"],
    )
    assert 0 <= one["admission_s"] <= one["first_token_s"] <= one["seconds"]
    came, waits, *others = said(one, "ingress-1")
    assert (came, waits) == (
        "the request came",
        f"its prompt of {one['prompt_tokens']} tokens waits for admission",
    )
    assert others == [
        "admitted",
        f"sent to the engines as {one['request_id']}",
        "first token from fake",
        "ended: length, 4 output tokens",
    ]
    assert said(one, "fake") == ["first token"], "the engine's own events"
    times = [event["at"] for event in one["events"]]
    assert times == sorted(times)


async def test_request_that_still_waits_for_its_first_token_is_told_so(api):
    api.engine.paused.set()
    asked = asyncio.create_task(api.client.post("/v1/completions", json=ASKED, headers={"X-Request-Id": "slow"}))
    await until(lambda: api.engine.num_live == 1)
    while not said(one := (await told(api.client, "slow"))[0], "fake"):
        await asyncio.sleep(0.005)
    assert said(one, "fake") == ["queued"], "without a token"
    assert (one["state"], one["reason"], one["output_tokens"]) == ("waiting", None, 0)
    api.engine.paused.clear()
    assert (await asked).status_code == 200
    assert [one["state"] for one in await told(api.client, "slow")] == ["ended"]


async def test_unknown_request_is_not_found_and_without_a_key_nothing_is_told(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"alice:{hash_key('sk-1')}\n")
    async with fake_api(auth=AuthConfig(api_keys_file=str(keys))) as api:
        assert (await api.client.get("/debug/requests/cmpl-x")).status_code == 401
        answer = await api.client.get("/debug/requests/cmpl-x", headers={"Authorization": "Bearer sk-1"})
        assert answer.status_code == 404
        assert answer.json()["error"]["message"].startswith("request 'cmpl-x' is unknown")


async def test_timeline_of_a_replayed_request_names_each_attempt_and_why_it_failed(monkeypatch):
    monkeypatch.setattr(retry, "BACK_OFF_S", 0.0)
    name = "cmpl-x-abcd0123-0"
    asked = GenerateRequest(
        request_id=name, prompt=[5, 6, 7], params=SamplingParams(max_tokens=12, min_tokens=12), timeout_s=60.0
    )
    async with ingress() as one:
        pool = MortalPool(one.channel.address, {name: [Death(after=3)]})
        try:
            await listen(one.generation([asked], pool), [asked], pool.heard)
        finally:
            pool.close()
        (found,) = one.timelines.of("cmpl-x")
    assert (found.replays, found.attempts) == (1, [name, f"{name}.1"])
    lines = [event.what for event in found.events]
    failed = "the attempt failed after 3 tokens, another follows: engine_unavailable (rank 0 died)"
    assert lines.index(failed) < lines.index(f"sent to the engines as {name}.1") < len(lines) - 1


async def test_client_that_leaves_while_its_request_waits_for_admission_leaves_a_timeline_that_has_ended():
    async with fake_api(max_num_seqs=1) as api:
        api.engine.paused.set()
        flood, admission = [], api.model.admission
        for i in range(3):  # one after the other: texts are tokenized in threads, so they may overtake each other
            post = api.client.post("/v1/completions", json=ASKED, headers={"X-Request-Id": f"r{i}"})
            flood.append(asyncio.create_task(post))
            await until(lambda n=i + 1: admission.num_running + admission.num_waiting == n)
        await until(lambda: admission.num_waiting == 1)
        (last,) = await told(api.client, "r2")
        assert said(last, "ingress-1")[-1] == f"its prompt of {last['prompt_tokens']} tokens waits for admission"
        flood[2].cancel()
        await asyncio.gather(flood[2], return_exceptions=True)
        (last,) = await told(api.client, "r2")
        assert (last["state"], last["reason"], last["admission_s"]) == ("ended", "abort", None)
        api.engine.paused.clear()
        await asyncio.gather(*flood[:2])


def test_only_the_newest_of_those_that_have_ended_are_remembered_and_all_that_live():
    timelines = RequestTimelines("ingress-1")
    timelines.begin(timeline("live-a-b-0"))
    for number in range(MAX_ENDED + 1):
        ended = timeline(f"cmpl-{number}-a-0")
        timelines.begin(ended)
        timelines.end(ended)
    assert timelines.of("cmpl-0") == []
    assert len(timelines.of("cmpl-1")) == len(timelines.of("live-a-b-0")) == 1


def test_note_of_an_attempt_goes_to_its_live_sequence_once_and_none_to_others():
    timelines = RequestTimelines("ingress-1")
    one = timeline("cmpl-x-a-0", events=[TimelineEvent(0.0, "ingress-1", "sent")])
    timelines.begin(one)
    for attempt in ("cmpl-x-a-0", "cmpl-x-a-0.1", "cmpl-x-a-1", "cmpl-x-a-0.1"):
        timelines.note(attempt, f"routed for {attempt}")
    assert [event.what for event in one.events] == [
        "sent", "routed for cmpl-x-a-0", "routed for cmpl-x-a-0.1"
    ]  # fmt: skip
    timelines.end(one)
    timelines.note("cmpl-x-a-0", "too late")
    assert len(one.events) == 3
    timelines.begin(one)
    for number in range(2 * MAX_EVENTS):
        timelines.note("cmpl-x-a-0", str(number))
    assert len(one.events) == MAX_EVENTS


class OtherIngress(NoPeers):
    async def ask(self, what: str, kind: type[Any], *args: str) -> list[Any]:
        sent = msgspec.msgpack.encode([timeline("cmpl-x-1-0", 1.0), timeline("cmpl-x-2-0", 2.0, seconds=0.5)])
        return [msgspec.msgpack.decode(sent, type=kind)]


async def test_timelines_of_other_ingresses_are_told_too_and_the_own_ones_once_and_never_stale():
    telemetry = Telemetry("a", peers=OtherIngress())
    telemetry.timelines.begin(timeline("cmpl-x-2-0", 2.0, seconds=1.5))
    found = (await telemetry.explain("cmpl-x")).sequences
    assert [(one.request_id, one.seconds) for one in found] == [("cmpl-x-1-0", None), ("cmpl-x-2-0", 1.5)]


async def test_both_engines_tell_of_a_prompt_that_was_computed_in_the_other_pool(folder):
    async with real_api_with_prefill(folder) as api:
        name = (await api.complete(prompt=list(range(5, 45)), max_tokens=5))["id"]
        (one,) = await told(api.client, name)
    decode, prefill = said(one, "decode-1"), said(one, "prefill-1")
    assert decode[0] == "queued behind 0 others, with 40 prompt tokens"
    assert decode[1] == "to be computed by a prefill engine: policy; 0 of 40 tokens are cached"
    assert any("accepted by prefill-1" in line for line in decode)
    assert any("received" in line for line in decode)
    assert decode[-2:] == ["first token", "ended: length, 5 output tokens"]
    assert prefill[0] == "queued behind 0 others, with 40 prompt tokens"
    assert any("first token computed" in line for line in prefill)
    assert one["queue_s"] >= 0 and one["prefill_s"] > 0
