"""Large bodies: refused before costly work, which never runs on the event loop, where all other requests would wait."""

from __future__ import annotations

import asyncio

import pytest

from tests.deployments.fake_api import MAX_MODEL_LEN, fake_api, tokenizer
from tests.deployments.openai.bad_requests import Bad

TEXT = "The quick brown fox. " * 20_000
HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/completions", {"prompt": ["a", TEXT]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
        ("/tokenize", {"prompt": TEXT}),
        ("/tokenize", {"messages": [{"role": "user", "content": TEXT}]}),
    ],
)
def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(path, body, monkeypatch):
    tokenized: list[int] = []
    encode = type(tokenizer())._encode

    def recorded(self, text, add_special_tokens):
        tokenized.append(len(text))
        return encode(self, text, add_special_tokens)

    async def scenario() -> None:
        async with fake_api() as api:
            monkeypatch.setattr(type(tokenizer()), "_encode", recorded)
            response = await api.client.post(path, json=body)
            Bad(path, b"", "prompt").check(response)
            assert max(tokenized, default=0) < 100

    asyncio.run(scenario())


@pytest.mark.parametrize("prompt", ["a b " * 300, [5] * MAX_MODEL_LEN, "a" * 10**5])
def test_prompt_that_does_not_fit_has_the_code_and_the_words_that_clients_look_for(prompt):
    async def scenario() -> None:
        async with fake_api() as api:
            error = (await api.post("completions", prompt=prompt)).json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert f"this model's maximum context length is {MAX_MODEL_LEN} tokens" in error["message"]

    asyncio.run(scenario())
