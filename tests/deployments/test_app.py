from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial

import pytest

from deployments.http.context import RequestContext
from deployments.http.streaming import stream
from deployments.openai.chat import ChatResponse
from deployments.openai.chat_body import ChatBody
from engine.errors import Overloaded
from engine.wire.token_delta import ErrorInfo
from tests.deployments.fake_api import fake_api, says, tokenizer, until

HELLO = [{"role": "user", "content": "hello"}]
TEXT = "The quick brown fox 👩‍🚀 jumps, héhé."


async def test_chat_answers_with_the_engines_text_and_counts_its_tokens():
    async with fake_api(says(TEXT)) as api:
        response = (await api.post("chat/completions", messages=HELLO)).json()
        assert response["object"] == "chat.completion"
        message = response["choices"][0]["message"]
        assert (message["role"], message["content"], message["refusal"]) == ("assistant", TEXT, None)
        assert response["choices"][0]["finish_reason"] == "length"
        assert response["usage"]["completion_tokens"] == len(tokenizer().encode(TEXT))
        assert response["usage"]["prompt_tokens"] == len(api.engine.added[0].prompt)
        assert api.engine.added[0].params.max_tokens is None


async def test_streamed_chat_has_the_same_text_and_the_role_comes_first():
    async with fake_api(says(TEXT)) as api:
        options = {"include_usage": True}
        *chunks, last, usage = await api.stream("chat/completions", messages=HELLO, stream_options=options)
        deltas = [chunk["choices"][0]["delta"] for chunk in [*chunks, last]]
        assert deltas[0] == {"role": "assistant", "content": "", "reasoning": None}
        assert "".join(delta.get("content", "") for delta in deltas) == TEXT
        assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * len(chunks)
        assert last["choices"][0]["finish_reason"] == "length"
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == len(tokenizer().encode(TEXT))


async def test_stop_string_cuts_the_text_and_stops_the_request_in_the_engine(api):
    response = (await api.post("completions", prompt="one two three", stop="three", max_tokens=400)).json()
    choice = response["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one two ", "stop", "three")
    await until(lambda: api.engine.stopped == [api.engine.added[0].request_id])
    await until(lambda: api.engine.num_live == 0)
    assert not api.engine.aborted


async def test_n_choices_of_every_prompt_get_seeds_of_their_own(api):
    response = (await api.post("completions", prompt=["ab", "cd"], n=2, seed=7, max_tokens=2)).json()
    assert [c["index"] for c in response["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in response["choices"]] == ["ab", "ab", "cd", "cd"]
    assert sorted(r.params.seed for r in api.engine.added) == [7, 7, 8, 8]
    assert response["usage"]["prompt_tokens"] == 4


async def test_echo_puts_the_prompt_and_its_logprobs_first():
    async with fake_api(says("xy")) as api:
        response = (await api.post("completions", prompt="ab", echo=True, logprobs=1, max_tokens=2)).json()
        choice = response["choices"][0]
        assert choice["text"] == "abxy"
        assert choice["logprobs"]["tokens"] == ["a", "b", "x", "y"]
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
        assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -0.5, -0.5]


async def test_echo_with_no_tokens_returns_the_prompt_alone(api):
    response = (await api.post("completions", prompt="ab", echo=True, logprobs=0, max_tokens=0)).json()
    assert response["choices"][0]["text"] == "ab"
    assert response["choices"][0]["logprobs"]["tokens"] == ["a", "b"]
    assert response["usage"]["completion_tokens"] == 0


async def test_chat_logprobs_carry_the_bytes_of_each_token():
    async with fake_api(says("é")) as api:
        response = (await api.post("chat/completions", messages=HELLO, logprobs=True, top_logprobs=1)).json()
        assert response["choices"][0]["logprobs"]["refusal"] is None
        content = response["choices"][0]["logprobs"]["content"]
        assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9]]
        assert [len(entry["top_logprobs"]) for entry in content] == [1, 1]


async def test_content_given_as_text_parts_is_one_text(api):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await api.post("chat/completions", messages=[{"role": "user", "content": parts}], max_tokens=1)
    await api.post("chat/completions", messages=[{"role": "user", "content": "a\nb"}], max_tokens=1)
    assert api.engine.added[0].prompt == api.engine.added[1].prompt


async def test_closing_a_stream_aborts_all_its_sequences(api):
    body = ChatBody.model_validate({"messages": HELLO, "n": 3, "stream": True})
    output = await api.model.chat(body, RequestContext("chatcmpl-1", 0, "test"))
    async with aclosing(output.chunks()) as chunks:
        await anext(chunks)
    await until(lambda: len(api.engine.aborted) == 3 and not api.engine.num_live)


async def test_one_request_id_may_name_several_answers():
    async with fake_api(says("a")) as api:
        ask = partial(api.client.post, "/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "abc"})
        responses = await asyncio.gather(ask(), ask())
        assert [response.json()["id"] for response in responses] == ["cmpl-abc", "cmpl-abc"]
        assert len({request.request_id for request in api.engine.added}) == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_refusal_by_the_engine_has_its_own_status(stream, api):
    api.engine.refusal = ErrorInfo.of(Overloaded("the queue is full"))
    response = await api.post("completions", prompt="a", stream=stream)
    assert response.status_code == 429
    assert response.json()["error"]["type"] == "rate_limit_error"


async def test_loss_of_the_replica_ends_a_stream_with_an_error_event():
    async with fake_api(max_replays=0) as api:
        body = ChatBody.model_validate({"messages": HELLO, "stream": True})
        context = RequestContext("chatcmpl-1", 0, "test")
        response = ChatResponse(body, context, await api.model.chat(body, context))
        event_stream = await stream(response.chunks())
        api.engine.paused.set()
        api.replica.fail("rank 0 died")
        events = [event async for event in event_stream.body_iterator]
        assert b'"code":"engine_unavailable"' in events[-2]
        assert events[-1] == b"data: [DONE]\n\n"


async def test_health_fails_when_the_engine_is_gone(api):
    await api.post("completions", prompt="a", max_tokens=1)
    assert (await api.client.get("/health")).status_code == 200
    api.replica.fail("rank 0 died")
    response = await api.client.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "rank 0 died"
    metrics = (await api.client.get("/metrics")).text
    assert 'manta_up{model_name="fake"} 0.0' in metrics and 'manta_asleep{model_name="fake"} 0.0' in metrics


async def test_a_model_that_is_scaled_to_zero_is_healthy(api):
    api.replica.fail("no replica is up and healthy")
    api.model.pool.sleeps = True
    assert (await api.client.get("/health")).status_code == 200
    metrics = (await api.client.get("/metrics")).text
    assert 'manta_up{model_name="fake"} 0.0' in metrics and 'manta_asleep{model_name="fake"} 1.0' in metrics


async def test_metrics_have_vllms_names(api):
    await api.post("completions", prompt="a", max_tokens=1)
    text = (await api.client.get("/metrics")).text
    assert 'vllm:num_requests_running{engine="fake",model_name="fake"} 0.0' in text
    assert 'request_success_total{finished_reason="length",ingress="ingress-1",model_name="fake"} 1.0' in text
    assert 'manta_kv_blocks{engine="fake",model_name="fake",state="free"} 10.0' in text


async def test_fields_that_change_nothing_are_accepted(api):
    body = {"prompt": "a", "max_tokens": 1, "user": "me", "metadata": {}, "best_of": 1, "suffix": None}
    response = await api.post("completions", **body, repetition_penalty=1.0, logprobs=None, n=None)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
async def test_best_of_below_n_is_refused_and_one_above_it_is_named_in_a_warning(route, api):
    given = {"messages": HELLO} if route == "chat/completions" else {"prompt": "a"}
    response = await api.post(route, **given, max_tokens=1, n=2, best_of=1)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")
    assert response.json()["error"]["message"] == "best_of must be at least n (2), got 1"
    assert not api.engine.added
    for best_of, warning in ((2, None), (3, '299 manta "ignored: best_of"')):
        response = await api.post(route, **given, max_tokens=1, n=2, best_of=best_of)
        assert (len(response.json()["choices"]), response.headers.get("warning")) == (2, warning)


@pytest.mark.parametrize(("asked", "most"), [({}, 7), ({"max_tokens": 3}, 3), ({"max_tokens": 300}, 300)])
async def test_a_models_own_number_of_new_tokens_is_a_default_and_the_configurations_a_limit(asked, most):
    async with fake_api(default_sampling={"max_tokens": 7}) as api:
        await api.post("chat/completions", messages=HELLO, **asked)
        assert api.engine.added[0].params.max_tokens == most
    async with fake_api(default_sampling={"max_tokens": 7}, max_new_tokens=7) as api:
        for route, body in (("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "a"})):
            await api.post(route, **body, **asked)
            assert api.engine.added[-1].params.max_tokens == min(most, 7)


async def test_request_overrides_the_models_default_sampling():
    async with fake_api(default_sampling={"temperature": 0.6, "top_p": 0.9}) as api:
        await api.post("completions", prompt="a", max_tokens=1, top_p=0.5)
        params = api.engine.added[0].params
        assert (params.temperature, params.top_p) == (0.6, 0.5)
