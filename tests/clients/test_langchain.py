from __future__ import annotations

from typing import Any

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.clients import weather
from tests.clients.weather import CALL_WEATHER, WEATHER


@pytest.mark.parametrize("responses_api", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_conversation_with_a_tool_call(server, responses_api, streamed):
    chat = ChatOpenAI(
        model="obedient",
        base_url=f"{server}/v1",
        api_key="none",
        max_retries=0,
        use_responses_api=responses_api,
        reasoning_effort="low",
    ).bind_tools([tool(weather.get_weather)])
    messages: list[Any] = [HumanMessage(CALL_WEATHER)]

    def ask() -> Any:
        if not streamed:
            return chat.invoke(messages)
        chunks = list(chat.stream(messages))
        answer = chunks[0]
        for chunk in chunks[1:]:
            answer += chunk
        return answer

    answer = ask()
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    messages += [answer, ToolMessage(WEATHER, tool_call_id=call["id"])]
    assert WEATHER in ask().text


@pytest.mark.parametrize("responses_api", [False, True])
def test_a_prompt_beyond_the_context_is_langchains_own_error(server, responses_api):
    chat = ChatOpenAI(
        model="obedient", base_url=f"{server}/v1", api_key="none", max_retries=0, use_responses_api=responses_api
    )
    for ask in (chat.invoke, lambda prompt: list(chat.stream(prompt))):
        with pytest.raises(ContextOverflowError):
            ask("word " * 250_000)
