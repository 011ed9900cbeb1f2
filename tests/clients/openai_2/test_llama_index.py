from __future__ import annotations

import asyncio

import openai
import pytest
from llama_index.core.agent.workflow import AgentStream, FunctionAgent, ToolCallResult
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

from tests.clients.answers import CITY
from tests.clients.weather import CALL_WEATHER, WEATHER, get_weather


class City(BaseModel):
    """A city."""

    name: str
    population: int


def model(server: str) -> OpenAILike:
    return OpenAILike(
        model="obedient",
        api_base=f"{server}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=100_000,
    )


def test_stream_has_the_text_of_the_whole_answer(server):
    talk = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="hello")]
    chunks = list(model(server).stream_chat(talk))
    assert chunks[-1].message.content == model(server).chat(talk).message.content == "I heard: hello"


@pytest.mark.parametrize("native", [False, True])
def test_an_object_of_a_class(server, native):
    """native: by `response_format`; else as a call of a tool that is required."""
    objects = model(server).model_copy(update={"should_use_structured_outputs": native}).as_structured_llm(City)
    assert objects.complete("Describe Paris.").raw == City(**CITY)
    *_, last = objects.stream_chat([ChatMessage(role="user", content="Describe Paris.")])
    assert last.raw == City(**CITY)


def test_usage_of_an_answer_and_of_its_stream(server):
    talk = [ChatMessage(role="user", content="hello")]
    whole = model(server).chat(talk).raw.usage
    *_, last = model(server).stream_chat(talk, stream_options={"include_usage": True})
    assert last.raw.usage.total_tokens == whole.total_tokens > 0


def test_completions(server):
    plain = model(server).model_copy(update={"is_chat_model": False})
    *_, last = plain.stream_complete("hello")
    assert last.text == plain.complete("hello").text == "I heard: "


def test_a_refused_request_is_the_error_of_openais_client(server):
    with pytest.raises(openai.BadRequestError, match="top_p must be"):
        model(server).complete("hello", top_p=7)


def test_agent_calls_its_tool_and_streams_the_answer(server):
    async def scenario() -> None:
        agent = FunctionAgent(tools=[get_weather], llm=model(server))
        handler = agent.run(CALL_WEATHER)
        events = [event async for event in handler.stream_events()]
        assert [e.tool_output.content for e in events if isinstance(e, ToolCallResult)] == [WEATHER]
        assert WEATHER in "".join(event.delta for event in events if isinstance(event, AgentStream))
        assert WEATHER in str(await handler)

    asyncio.run(scenario())
