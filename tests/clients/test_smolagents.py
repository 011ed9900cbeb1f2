from __future__ import annotations

import openai
import pytest
from smolagents import ChatMessage, CodeAgent, MessageRole, OpenAIModel, ToolCallingAgent, tool
from smolagents.models import agglomerate_stream_deltas

from tests.clients import weather
from tests.clients.answers import CITY, CITY_SCHEMA, dumps
from tests.clients.weather import CALL_WEATHER, WEATHER


@pytest.fixture
def model(server) -> OpenAIModel:
    return OpenAIModel("obedient", f"{server}/v1", api_key="none", client_kwargs={"max_retries": 0})


@tool
def get_weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: Name of a city.
    """
    return weather.get_weather(city)


def user(text: str) -> list[ChatMessage]:
    return [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": text}])]


def test_a_stream_has_the_text_and_the_usage_of_the_whole_answer(model):
    whole = model.generate(user("hello"))
    streamed = agglomerate_stream_deltas(list(model.generate_stream(user("hello"))))
    assert streamed.content == whole.content == "I heard: hello"
    assert streamed.token_usage == whole.token_usage
    assert whole.token_usage.input_tokens > 0


def test_a_stop_sequence_ends_the_answer(model):
    assert model.generate(user("one two"), stop_sequences=["two"]).content == "I heard: one "


def test_an_object_of_a_schema(model):
    form = {"type": "json_schema", "json_schema": {"name": "City", "schema": CITY_SCHEMA, "strict": True}}
    assert model.generate(user("Describe Paris."), response_format=form).content == dumps(CITY)


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_of_tool_calls(model, streamed):
    agent = ToolCallingAgent([get_weather], model, stream_outputs=streamed, max_steps=4, verbosity_level=0)
    run = agent.run(CALL_WEATHER, return_full_result=True)
    assert (run.state, run.output) == ("success", WEATHER)
    calls = [call["function"]["name"] for step in run.steps for call in step.get("tool_calls") or []]
    assert calls == ["get_weather", "final_answer"]
    assert run.token_usage.output_tokens > 0


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("structured", [False, True])
def test_an_agent_that_writes_code(model, streamed, structured):
    agent = CodeAgent(
        [],
        model,
        stream_outputs=streamed,
        use_structured_outputs_internally=structured,
        max_steps=2,
        verbosity_level=0,
    )
    task = "Compute 6 * 7 in an object." if structured else "Compute 6 * 7."
    assert agent.run(task) == 42


def test_a_refused_request_is_the_error_of_openais_client(model):
    with pytest.raises(openai.BadRequestError, match="top_p must be"):
        model.generate(user("hello"), top_p=7)
