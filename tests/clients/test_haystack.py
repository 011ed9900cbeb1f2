from __future__ import annotations

from typing import Any

import openai
import pytest
from haystack.components.agents import Agent
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, Document
from haystack.tools import Tool
from haystack.utils import Secret

from tests.clients.answers import CITY, CITY_SCHEMA, dumps
from tests.clients.weather import CALL_WEATHER, PARAMETERS, WEATHER, get_weather

TOOL = Tool("get_weather", "Return the weather of a city.", PARAMETERS, get_weather)


@pytest.fixture
def options(server) -> dict[str, Any]:
    return {"model": "obedient", "api_base_url": f"{server}/v1", "api_key": Secret.from_token("none"), "max_retries": 0}


@pytest.fixture(params=[OpenAIChatGenerator, OpenAIResponsesChatGenerator])
def generator(request, options) -> Any:
    return request.param(**options)


def test_a_stream_has_the_text_of_the_whole_answer(generator):
    talk, chunks = [ChatMessage.from_system("Be brief."), ChatMessage.from_user("hello")], []
    (whole,) = generator.run(talk)["replies"]
    (streamed,) = generator.run(talk, streaming_callback=chunks.append)["replies"]
    assert "".join(chunk.content for chunk in chunks) == streamed.text == whole.text == "I heard: hello"
    assert len(chunks) > 2


def test_usage_of_a_chat_and_of_its_stream(options):
    usage = {"stream_options": {"include_usage": True}}
    (whole,) = OpenAIChatGenerator(**options).run("hello")["replies"]
    streaming = OpenAIChatGenerator(**options, generation_kwargs=usage, streaming_callback=lambda chunk: None)
    (streamed,) = streaming.run("hello")["replies"]
    for reply in (whole, streamed):
        assert reply.meta["finish_reason"] == "stop"
        assert reply.meta["usage"]["total_tokens"] > reply.meta["usage"]["prompt_tokens"] > 0


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_an_agent_calls_its_tool_and_answers(generator, streamed, strict):
    generator.tools_strict = strict
    agent = Agent(chat_generator=generator, tools=[TOOL], streaming_callback=(lambda chunk: None) if streamed else None)
    messages = agent.run(messages=[ChatMessage.from_user(CALL_WEATHER)])["messages"]
    (call,) = [call for message in messages for call in message.tool_calls]
    assert (call.tool_name, call.arguments) == ("get_weather", {"city": "Paris"})
    assert messages[-1].text == f"The tool said: {WEATHER}"


def test_an_object_of_a_schema(options):
    form = {"type": "json_schema", "json_schema": {"name": "City", "schema": CITY_SCHEMA, "strict": True}}
    chat = OpenAIChatGenerator(**options, generation_kwargs={"response_format": form})
    assert chat.run("Describe Paris.")["replies"][0].text == dumps(CITY)
    form = {"format": {"type": "json_schema", "name": "City", "schema": CITY_SCHEMA, "strict": True}}
    chat = OpenAIResponsesChatGenerator(**options, generation_kwargs={"text": form})
    assert chat.run("Describe Paris.")["replies"][0].text == dumps(CITY)


def test_embeddings(options):
    answer = OpenAITextEmbedder(**options).run("one")
    assert len(answer["embedding"]) == 4
    assert answer["meta"]["usage"]["prompt_tokens"] > 0
    documents = OpenAIDocumentEmbedder(**options).run([Document(content="one"), Document(content="two")])["documents"]
    assert [len(document.embedding) for document in documents] == [4, 4]


def test_a_refused_request_is_the_error_of_openais_client(generator):
    with pytest.raises(openai.BadRequestError, match="top_p must be"):
        generator.run("hello", generation_kwargs={"top_p": 7})
