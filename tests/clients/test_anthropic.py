from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from tests.clients.weather import CALL_WEATHER, PARAMETERS, WEATHER

TOOL = {"name": "get_weather", "description": "Return the weather of a city.", "input_schema": PARAMETERS}


@pytest.fixture
def client(server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("streamed", [False, True])
def test_messages_with_a_tool_call(client, streamed):
    messages = [{"role": "user", "content": CALL_WEATHER}]

    def ask() -> anthropic.types.Message:
        request = {"model": "obedient", "max_tokens": 500, "messages": messages, "tools": [TOOL]}
        if not streamed:
            return client.messages.create(**request)
        with client.messages.stream(**request) as stream:
            return stream.get_final_message()

    answer = ask()
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert (answer.stop_reason, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": WEATHER}
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    answer = ask()
    assert answer.stop_reason == "end_turn"
    assert WEATHER in answer.content[0].text


def test_tokens_are_counted_as_the_answer_counts_them(client):
    request = {"model": "obedient", "messages": [{"role": "user", "content": "hello"}], "system": "Be brief."}
    counted = client.messages.count_tokens(**request).input_tokens
    usage = client.messages.create(**request, max_tokens=5).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_errors_are_the_clients_own(client):
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=5, messages=[{"role": "user", "content": "hello"}])
