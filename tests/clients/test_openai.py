from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.clients.weather import CALL_WEATHER, PARAMETERS, WEATHER

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("streamed", [False, True])
def test_chat_with_a_tool_call(client, streamed):
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": CALL_WEATHER}]

    def ask() -> openai.types.chat.ChatCompletion:
        request = {"model": "obedient", "messages": messages, "tools": [TOOL]}
        if not streamed:
            return client.chat.completions.create(**request)
        with client.chat.completions.stream(**request) as stream:
            for _ in stream:
                pass
            return stream.get_final_completion()

    choice = ask().choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "get_weather")
    assert call.function.arguments == '{"city": "Paris"}'
    messages += [choice.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": WEATHER}]
    assert WEATHER in ask().choices[0].message.content


@pytest.mark.parametrize("streamed", [False, True])
def test_response_with_a_tool_call_and_its_result(client, streamed):
    tool = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}

    def ask(**request: object) -> openai.types.responses.Response:
        request |= {"model": "obedient", "tools": [tool]}
        if not streamed:
            return client.responses.create(**request)
        with client.responses.stream(**request) as stream:
            for _ in stream:
                pass
            return stream.get_final_response()

    first = ask(input=CALL_WEATHER)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Paris"}')
    result = {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER}
    assert WEATHER in ask(input=[result], previous_response_id=first.id).output_text
    (stored,) = client.responses.retrieve(first.id).output
    assert (stored.call_id, stored.arguments) == (call.call_id, call.arguments)
