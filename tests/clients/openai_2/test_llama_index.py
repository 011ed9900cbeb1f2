from __future__ import annotations

import asyncio

from llama_index.core.agent.workflow import AgentStream, FunctionAgent, ToolCallResult
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

from tests.clients.weather import CALL_WEATHER, WEATHER, get_weather


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


def test_agent_calls_its_tool_and_streams_the_answer(server):
    async def scenario() -> None:
        agent = FunctionAgent(tools=[get_weather], llm=model(server))
        handler = agent.run(CALL_WEATHER)
        events = [event async for event in handler.stream_events()]
        assert [e.tool_output.content for e in events if isinstance(e, ToolCallResult)] == [WEATHER]
        assert WEATHER in "".join(event.delta for event in events if isinstance(event, AgentStream))
        assert WEATHER in str(await handler)

    asyncio.run(scenario())
