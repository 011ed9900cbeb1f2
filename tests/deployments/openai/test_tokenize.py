from __future__ import annotations

from threading import Event

import pytest

from tests.deployments.fake_api import MAX_MODEL_LEN, fake_api, tokenizer
from tests.deployments.openai.chat_models import QWEN, VOCAB_SIZE, chat_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
TEXT = "The quick brown fox 👩‍🚀 jumps, héhé."


async def test_tokens_of_a_text_come_back_as_the_text(api):
    response = (await api.client.post("/tokenize", json={"prompt": TEXT})).json()
    assert response["tokens"] == tokenizer().encode(TEXT)
    assert response["count"] == len(response["tokens"])
    assert response["max_model_len"] == MAX_MODEL_LEN
    assert response["token_strs"] is None
    back = (await api.client.post("/detokenize", json={"tokens": response["tokens"]})).json()
    assert back["prompt"].endswith(TEXT)


async def test_tokens_of_messages_are_those_that_a_chat_sends_to_the_engine(api):
    response = (await api.client.post("/tokenize", json={"model": "fake", "messages": HELLO})).json()
    await api.post("chat/completions", messages=HELLO, max_tokens=1)
    assert response["tokens"] == api.engine.added[0].prompt


@pytest.mark.parametrize("special", [None, True, False])
async def test_special_tokens_are_as_in_a_completion(special, api):
    body = {"prompt": "a b", "add_special_tokens": special}
    response = (await api.client.post("/tokenize", json=body)).json()
    await api.post("completions", max_tokens=1, **body)
    assert response["tokens"] == api.engine.added[0].prompt


async def test_token_strings_are_those_of_the_vocabulary(api):
    body = {"prompt": "a é", "return_token_strs": True, "add_special_tokens": False}
    response = (await api.client.post("/tokenize", json=body)).json()
    assert response["token_strs"] == [tokenizer().token(i) for i in response["tokens"]]
    assert response["token_strs"][0] == "a"


async def test_empty_text_has_no_tokens(api):
    body = {"prompt": "", "add_special_tokens": False}
    assert (await api.client.post("/tokenize", json=body)).json()["count"] == 0
    assert (await api.client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_tools_and_template_options_are_as_in_a_chat():
    async with fake_api(text_model=chat_tokenizer(QWEN), vocab_size=VOCAB_SIZE) as api:
        plain = (await api.client.post("/tokenize", json={"messages": HELLO})).json()
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        body = {"messages": HELLO, "tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
        response = (await api.client.post("/tokenize", json=body)).json()
        await api.post("chat/completions", max_tokens=1, **body)
        assert response["tokens"] == api.engine.added[0].prompt
        assert response["count"] > plain["count"]


async def test_a_tokenizer_that_stands_still_ends_requests_at_their_deadline(monkeypatch):
    slow, ended = tokenizer(), Event()
    monkeypatch.setattr(slow, "encode", lambda *_: ended.wait(60))
    async with fake_api(text_model=slow, request_timeout_s=0.05) as api:
        try:
            response = await api.client.post("/tokenize", json={"prompt": "a"})
        finally:
            ended.set()
        assert response.status_code == 408
        assert "deadline of 0.1 s" in response.json()["error"]["message"]
