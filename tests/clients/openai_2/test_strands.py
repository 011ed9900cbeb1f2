from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager
from strands.models import Model
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel
from strands.types.exceptions import ContextWindowOverflowException

from tests.clients import weather
from tests.clients.answers import CITY
from tests.clients.weather import CALL_WEATHER, WEATHER


class City(BaseModel):
    """A city."""

    name: str
    population: int


@pytest.fixture(params=[OpenAIModel, OpenAIResponsesModel])
def model(request, server) -> Model:
    client = {"base_url": f"{server}/v1", "api_key": "none", "max_retries": 0}
    return request.param(client_args=client, model_id="obedient")


def agent(model: Model, **options: Any) -> Agent:
    options |= {"callback_handler": None, "retry_strategy": None, "conversation_manager": NullConversationManager()}
    return Agent(model=model, **options)


def test_a_text_its_stream_and_its_usage(model):
    async def scenario() -> None:
        events = [event async for event in agent(model, system_prompt="Be brief.").stream_async("hello")]
        texts = [event["data"] for event in events if "data" in event]
        assert len(texts) > 1
        assert "".join(texts) == "I heard: hello"
        result = events[-1]["result"]
        assert (result.stop_reason, str(result).strip()) == ("end_turn", "I heard: hello")
        usage = result.metrics.accumulated_usage
        assert usage["totalTokens"] == usage["inputTokens"] + usage["outputTokens"] > 0

    asyncio.run(scenario())


def test_an_agent_calls_its_tool_and_answers(model):
    helper = agent(model, tools=[tool(weather.get_weather)])
    assert str(helper(CALL_WEATHER)).strip() == f"The tool said: {WEATHER}"
    (call,) = [part["toolUse"] for message in helper.messages for part in message["content"] if "toolUse" in part]
    assert (call["name"], call["input"]) == ("get_weather", {"city": "Paris"})


def test_an_object_of_a_class(model):
    assert agent(model)("Describe Paris.", structured_output_model=City).structured_output == City(**CITY)


def test_an_object_in_one_request(model):
    async def scenario() -> None:
        talk = [{"role": "user", "content": [{"text": "Describe Paris."}]}]
        *_, last = [event async for event in model.structured_output(City, talk)]
        assert last["output"] == City(**CITY)

    asyncio.run(scenario())


def test_a_prompt_beyond_the_context_is_strands_own_error(model):
    with pytest.raises(ContextWindowOverflowException):
        agent(model)("word " * 250_000)


def test_a_refused_request_is_the_error_of_openais_client(model):
    model.update_config(params={"top_p": 7})
    with pytest.raises(openai.BadRequestError, match="top_p must be"):
        agent(model)("hello")
