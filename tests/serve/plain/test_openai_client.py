"""The official client against a real `serve run`."""

from __future__ import annotations

import asyncio
import time

import httpx
import openai
import pytest

from tests.scrape import Scrape
from tests.serve.idle import is_idle
from tests.serve.serve_run import wait_until

pytestmark = pytest.mark.serve

HELLO = [{"role": "user", "content": "hello"}]


def test_chat_answers(client):
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=5, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.completion_tokens == 5
    assert answer.choices[0].finish_reason == "length"


def test_streamed_chat_has_the_text_of_the_whole_one_in_many_chunks(client):
    ask = {"model": "tiny", "messages": HELLO, "max_tokens": 60, "temperature": 0}
    whole = client.chat.completions.create(**ask).choices[0].message.content
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert len(chunks) > 10
    assert chunks[-1].usage.completion_tokens == 60


def test_first_token_comes_long_before_the_last(client):
    def first_to_last() -> float:
        started = time.monotonic()
        stream = client.completions.create(
            model="tiny", prompt="The", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        arrivals = [time.monotonic() - started for _ in stream]
        return arrivals[0] / arrivals[-1]

    assert any(first_to_last() < 1 / 4 for _ in range(10)), "what else runs here may hold up any one of them"


def test_same_seed_gives_the_same_text(client):
    def ask(seed: int) -> str:
        answer = client.completions.create(model="tiny", prompt="The", max_tokens=20, temperature=1, seed=seed)
        return answer.choices[0].text

    assert ask(1) == ask(1)
    assert ask(1) != ask(2)


def test_logprobs_of_an_echoed_prompt_line_up_with_the_text(client):
    choice = client.completions.create(model="tiny", prompt="The fox", max_tokens=3, echo=True, logprobs=2).choices[0]
    logprobs = choice.logprobs
    assert choice.text.startswith("The fox")
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)
    assert len(logprobs.top_logprobs) == len(logprobs.tokens)


def test_logprobs_of_a_chat_have_bytes_and_alternatives(client):
    answer = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=4,
        logprobs=True,
        top_logprobs=3,
        temperature=0,
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )
    content = answer.choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in content] == [3] * 4
    assert (
        b"".join(bytes(entry.bytes) for entry in content).decode(errors="replace") == answer.choices[0].message.content
    )


def test_raw_response_has_headers_and_the_same_body(client):
    ask = {"model": "tiny", "prompt": "The", "max_tokens": 3, "temperature": 0}
    raw = client.completions.with_raw_response.create(**ask, extra_headers={"X-Request-Id": "abc"})
    assert raw.status_code == 200
    assert raw.headers["content-type"] == "application/json"
    assert raw.request_id == "abc"
    parsed = raw.parse()
    assert (parsed.id, parsed.usage.completion_tokens) == ("cmpl-abc", 3)


def test_many_prompts_and_several_answers_of_each(client):
    answer = client.completions.create(model="tiny", prompt=["The", "A"], n=3, max_tokens=2, seed=1)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage.completion_tokens == 12


def test_errors_are_raised_as_the_clients_own(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="The", temperature=-5)
    assert (caught.value.param, caught.value.code) == ("temperature", "invalid_parameter")
    ask = {"model": "tiny", "prompt": "The", "max_tokens": 500, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(**ask, extra_headers={"X-Request-Timeout-Ms": "1"})
    assert caught.value.status_code == 408


def test_models_are_listed_and_retrieved(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 512


@pytest.mark.slow
def test_16_streams_at_once_have_the_texts_of_the_same_prompts_alone(server):
    prompts = [f"{i} quick brown foxes and {i * i} lazy dogs" for i in range(16)]
    ask = {"model": "tiny", "max_tokens": 40, "temperature": 0, "stream": True}

    async def text(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(prompt=prompt, **ask)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def scenario() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            alone = [await text(client, prompt) for prompt in prompts]
            assert await asyncio.gather(*(text(client, prompt) for prompt in prompts)) == alone
            assert len(set(alone)) > 10

    asyncio.run(scenario())


def test_50_streams_whose_clients_leave_free_all_their_blocks(server, client):
    body = {"model": "tiny", "prompt": "The", "max_tokens": 500, "ignore_eos": True, "stream": True}

    async def leave_after_the_first_chunk(http: httpx.AsyncClient) -> None:
        async with http.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            await anext(response.aiter_lines())

    async def scenario() -> None:
        limits = httpx.Limits(max_connections=50)
        async with httpx.AsyncClient(timeout=60, limits=limits) as http:
            await asyncio.gather(*(leave_after_the_first_chunk(http) for _ in range(50)))

    asyncio.run(scenario())
    wait_until(lambda: is_idle(server))
    scrape = Scrape(httpx.get(f"{server.url}/metrics", timeout=60).text)
    assert scrape.sum("vllm:request_success_total", finished_reason="abort") >= 10
    assert client.completions.create(model="tiny", prompt="The", max_tokens=2).usage.completion_tokens == 2


def test_unknown_model_raises_the_clients_not_found(client):
    with pytest.raises(openai.NotFoundError, match="this server has: tiny"):
        client.completions.create(model="other", prompt="a")
