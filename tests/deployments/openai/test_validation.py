"""No field of OpenAI's own types is ignored in silence: each changes the request, or is refused, or promises nothing.

The lists come from the installed `openai` package, so a field that is new there fails a test here.
"""

from __future__ import annotations

import asyncio
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from deployments.openai.requests import ChatBody, CompletionBody
from deployments.openai.validation import IGNORED_FIELDS, NEUTRAL_VALUES
from tests.deployments.fake_api import fake_api, says

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ROUTES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "chat/completions": (chat_params.CompletionCreateParamsStreaming, ChatBody, {"messages": HELLO}),
    "completions": (completion_params.CompletionCreateParamsStreaming, CompletionBody, {"prompt": "a"}),
}
# Values that ask for something, of every field that this server does not have.
REFUSED: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "wav"},
    "best_of": 2,
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "moderation": {"model": "omni-moderation-latest"},
    "prediction": {"type": "content", "content": "a"},
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "high",
    "service_tier": "priority",
    "store": True,
    "suffix": "the end",
    "verbosity": "high",
    "web_search_options": {},
}


def unsupported(route: str) -> set[str]:
    official, body, _ = ROUTES[route]
    return set(get_type_hints(official)) - set(body.model_fields)


@pytest.mark.parametrize("route", ROUTES)
def test_every_official_field_is_honoured_or_refused_or_known_to_promise_nothing(route):
    assert unsupported(route) <= set(REFUSED) | IGNORED_FIELDS


@pytest.mark.parametrize("route", ROUTES)
def test_field_that_is_not_supported_is_a_400_that_names_it(route):
    async def scenario() -> None:
        async with fake_api() as api:
            for name in unsupported(route) - IGNORED_FIELDS:
                response = await api.post(route, **ROUTES[route][2], **{name: REFUSED[name]})
                assert response.status_code == 400, (name, response.text)
                assert response.json()["error"]["param"] == name
            assert not api.engine.added

    asyncio.run(scenario())


@pytest.mark.parametrize("route", ROUTES)
def test_value_that_changes_nothing_is_accepted(route):
    async def scenario() -> None:
        async with fake_api(says("ok")) as api:  # also where max_tokens is null
            base = {**ROUTES[route][2], "max_tokens": 1}
            values = [(name, value) for name, values in NEUTRAL_VALUES.items() for value in values]
            values += [(name, {"a": "b"}) for name in IGNORED_FIELDS]
            values += [(name, None) for name in {*get_type_hints(ROUTES[route][0]), *REFUSED} - {"messages", "prompt"}]
            for name, value in values:
                response = await api.post(route, **{**base, name: value})
                assert response.status_code == 200, (name, value, response.text)

    asyncio.run(scenario())


# A value of every supported field that must be seen in the engine's request, in the response, or by the server.
HONOURED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.25},
    "top_p": {"top_p": 0.25},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "seed": {"seed": 7},
    "max_tokens": {"max_tokens": 3},
    "logit_bias": {"logit_bias": {"5": 1}},
    "stop": {"stop": ["zz"]},
    # vLLM's
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.25},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "min_tokens": {"min_tokens": 1},
    "stop_token_ids": {"stop_token_ids": [5]},
    "include_stop_str_in_output": {"include_stop_str_in_output": True},
    "ignore_eos": {"ignore_eos": True},
    "skip_special_tokens": {"skip_special_tokens": False},
    "allowed_token_ids": {"allowed_token_ids": [5]},
    "bad_words": {"bad_words": ["no"]},
}


@pytest.mark.parametrize("route", ROUTES)
def test_sampling_field_reaches_the_engine(route):
    async def scenario() -> None:
        async with fake_api() as api:
            for name, body in HONOURED.items():
                response = await api.post(route, **{**ROUTES[route][2], "max_tokens": 2, **body})
                assert response.status_code == 200, response.text
                value = getattr(api.engine.added[-1].params, name)
                expected = {5: 1.0} if name == "logit_bias" else body[name]
                assert value == expected, name

    asyncio.run(scenario())
