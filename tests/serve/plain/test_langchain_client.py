"""LangChain's client, which is not OpenAI's own in all it sends, against a real `serve run`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI  # its import takes a second, in each process that collects

pytestmark = pytest.mark.serve

TALK = [("system", "Be brief."), ("human", "hello"), ("ai", "hi"), ("human", "how are you?")]


@pytest.fixture
def chat(server) -> ChatOpenAI:
    from langchain_openai import ChatOpenAI

    base_url = f"{server.url}/v1"
    return ChatOpenAI(model="tiny", base_url=base_url, api_key="none", max_tokens=8, temperature=0, max_retries=0)


def test_conversation_is_answered_with_its_usage(chat):
    answer = chat.invoke(TALK)
    assert answer.type == "ai"
    assert answer.usage_metadata["output_tokens"] == 8
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.response_metadata["model_name"] == "tiny"


def test_stream_has_the_text_of_the_whole_answer_and_the_usage(chat):
    chunks = list(chat.stream(TALK, stream_usage=True))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.content == chat.invoke(TALK).content
    assert whole.usage_metadata["output_tokens"] == 8
    assert len(chunks) > 3


def test_batch_of_conversations_is_answered_at_once(chat):
    answers = asyncio.run(chat.abatch([[("human", f"say {i}")] for i in range(16)]))
    assert [answer.usage_metadata["output_tokens"] for answer in answers] == [8] * 16


def test_logprobs_of_a_chat(chat):
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke("hello")
    content = answer.response_metadata["logprobs"]["content"]
    assert len(content) == 8
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 8


def test_text_completion_and_its_stream(server):
    from langchain_openai import OpenAI

    llm = OpenAI(model="tiny", base_url=f"{server.url}/v1", api_key="none", max_tokens=8, temperature=0, max_retries=0)
    assert "".join(llm.stream("The fox")) == llm.invoke("The fox") != ""
