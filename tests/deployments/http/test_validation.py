"""What becomes of fields that a route does not have: they are refused, ignored with a Warning, or ask for nothing.

The lists of OpenAI's come from the installed `openai` package, so a field that is new there fails a test here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from deployments.http.body import parse
from deployments.http.middleware import AuthConfig
from deployments.openai.chat_body import ChatBody
from deployments.openai.completion_body import CompletionBody
from deployments.openai.foreign_fields import FOREIGN_FIELDS as FOREIGN
from engine.errors import InvalidParameter
from tests.deployments.bodies import BODIES
from tests.deployments.fake_api import fake_api, says, tokenizer
from tests.deployments.openai.bad_requests import Bad

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ROUTES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "chat/completions": (chat_params.CompletionCreateParamsStreaming, BODIES.kind(ChatBody), {"messages": HELLO}),
    "completions": (completion_params.CompletionCreateParamsStreaming, BODIES.kind(CompletionBody), {"prompt": "a"}),
}
# those of vLLM's main branch of autumn 2026, beside OpenAI's and those that ours have
VLLM = """
add_special_tokens allowed_token_ids bad_words cache_salt echo guided_choice guided_decoding_backend guided_grammar
guided_json guided_regex guided_whitespace_pattern ignore_eos include_stop_str_in_output kv_transfer_params
length_penalty logits_processors min_p min_tokens priority prompt_embeds prompt_logprobs repetition_detection
repetition_penalty request_id return_token_ids return_tokens_as_token_ids skip_special_tokens
spaces_between_special_tokens stop_token_ids structured_outputs top_k truncate_prompt_tokens truncation_side
use_beam_search vllm_xargs watermarking ec_transfer_params logprob_token_ids return_mm_kwargs return_token_offsets
routed_experts_prompt_start session_id stream_interval thinking_token_budget
"""
VLLM_CHAT = """
add_generation_prompt chat_template chat_template_kwargs continue_final_message documents include_reasoning
media_io_kwargs mm_processor_kwargs return_prompt_text
"""
ASKING: dict[str, Any] = {  # a value that asks for something
    "best_of": 2,
    "modalities": ["text", "audio"],
    "suffix": "the end",
    "verbosity": "high",
}


def defined(route: str) -> set[str]:
    """Fields that OpenAI or vLLM defines for a route."""
    more = VLLM_CHAT if route == "chat/completions" else ""
    return {*get_type_hints(ROUTES[route][0]), *VLLM.split(), *more.split()}


def foreign(route: str) -> set[str]:
    return defined(route) - set(ROUTES[route][1].model_fields)


@pytest.mark.parametrize("route", ROUTES)
def test_every_field_of_openai_s_and_vllm_s_is_obeyed_or_ignored_or_refused_for_a_reason(route):
    assert foreign(route) <= set(FOREIGN.ignored) | set(FOREIGN.refused) | set(FOREIGN.unused)
    assert not set(FOREIGN.ignored) & set(FOREIGN.refused) and set(FOREIGN.neutral) <= set(FOREIGN.ignored) | set(
        FOREIGN.refused
    )
    known = set.union(*map(defined, ROUTES))
    assert set(FOREIGN.ignored) | set(FOREIGN.refused) | set(FOREIGN.unused) <= known, (
        "no table has a field that nobody has"
    )


@pytest.mark.parametrize("route", ROUTES)
def test_the_documentation_says_of_every_field_what_becomes_of_it(route):
    page = (Path(__file__).parents[3] / "docs" / "http_api.md").read_text()
    for name in defined(route):
        if name in ROUTES[route][1].model_fields:
            assert f"`{name}`" in page, name
        else:
            reason = FOREIGN.refused.get(name) or FOREIGN.ignored.get(name) or FOREIGN.unused[name]
            assert f"| `{name}` | {reason} |" in page, name


@pytest.mark.parametrize("route", ROUTES)
async def test_field_without_which_the_answer_would_be_another_is_a_400_that_names_it_and_the_reason(route, api):
    for name in foreign(route) & set(FOREIGN.refused):
        response = await api.post(route, **ROUTES[route][2], **{name: ASKING.get(name, {"a": "b"})})
        Bad(route, b"", name).check(response)
        assert FOREIGN.refused[name] in response.json()["error"]["message"]
    assert not api.engine.added


@pytest.mark.parametrize("route", ROUTES)
async def test_field_that_is_ignored_is_named_in_a_warning_also_of_a_stream(route):
    async with fake_api(says("ok")) as api:
        for i, name in enumerate(sorted(foreign(route) & set(FOREIGN.ignored))):
            body = {**ROUTES[route][2], "max_tokens": 1, "stream": i % 2 == 0}
            response = await api.post(route, **body, **{name: ASKING.get(name, {"a": "b"})})
            assert response.status_code == 200, (name, response.text)
            assert response.headers["warning"] == f'299 manta "ignored: {name}"'


@pytest.mark.parametrize("route", ROUTES)
async def test_value_that_asks_for_nothing_is_accepted_without_a_word(route):
    async with fake_api(says("ok")) as api:  # also where max_tokens is null
        base = {**ROUTES[route][2], "max_tokens": 1}
        values = [(name, value) for name in foreign(route) for value in FOREIGN.neutral.get(name, [])]
        values += [(name, value) for name in foreign(route) - set(FOREIGN.unused) for value in (False, {}, [])]
        values += [(name, {"a": "b"}) for name in FOREIGN.unused]
        kind = ROUTES[route][1]
        for name, value in values:
            assert not parse(kind, json.dumps({**base, name: value}).encode()).ignored, name
        everything = dict.fromkeys({*defined(route), "nonsense"} - {"messages", "prompt"})
        for fields in (everything, dict(values)):
            response = await api.post(route, **{**base, **fields})
            assert response.status_code == 200, response.text
            assert "warning" not in response.headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
async def test_field_that_nobody_has_is_refused_or_ignored_as_the_configuration_says(path):
    body = {"messages": HELLO, "max_tokens": 1} if "chat" in path else {"prompt": "a"}
    body = {"tokens": [5]} if path == "/detokenize" else body
    async with fake_api(auth=AuthConfig(unknown_fields="refuse")) as api:
        response = await api.client.post(path, json={**body, "nonsense": 1})
        Bad(path, b"", "nonsense").check(response)
    async with fake_api(says("ok")) as api:
        response = await api.client.post(path, json={**body, "nonsense": 1, "store": True, "a\nb": 1})
        assert response.status_code == 200
        assert response.headers["warning"] == '299 manta "ignored: nonsense, store, 1 more"'


FORMS: dict[str, Any] = {
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "guided_grammar": 'start: "a"',
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", FORMS)
async def test_vllm_s_old_names_of_structured_outputs_work_and_are_named_in_errors(route, name):
    async with fake_api(says("ok")) as api:
        base, kind = {**ROUTES[route][2], "max_tokens": 1}, name.removeprefix("guided_")
        assert (await api.post(route, **base, **{name: FORMS[name]})).status_code == 200
        assert getattr(api.engine.added[-1].params.structured_outputs, kind) == FORMS[name]
        for more in ({"structured_outputs": {"regex": "a"}}, {"response_format": {"type": "json_object"}}):
            Bad(route, b"", name).check(await api.post(route, **base, **{name: FORMS[name]}, **more))
        Bad(route, b"", name).check(await api.post(route, **base, **{name: 5}))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("has_priorities", [True, False])
async def test_service_tier_is_a_priority_where_the_engine_has_them_and_the_answer_says_what_it_was(
    route, has_priorities
):
    async with fake_api(says("ok"), has_priorities=has_priorities) as api:
        base = {**ROUTES[route][2], "max_tokens": 1}
        for tier, priority in (("priority", -1), ("flex", 1), ("auto", 0), ("default", 0), ("scale", 0)):
            response = await api.post(route, **base, service_tier=tier)
            honoured = has_priorities and priority != 0
            assert api.engine.added[-1].priority == (priority if has_priorities else 0)
            assert response.json()["service_tier"] == (tier if honoured else "default")
            assert ("warning" in response.headers) == (priority != 0 and not has_priorities)
            *_, last = await api.stream(route, **base, service_tier=tier)
            assert last["service_tier"] == (tier if honoured else "default")
        assert (await api.post(route, **base)).json()["service_tier"] is None


async def test_reasoning_effort_is_a_variable_of_the_chat_template_or_is_ignored_with_a_warning(monkeypatch):
    template = "{{ reasoning_effort }} {{ enable_thinking }} {{ messages[0]['content'] }}"
    async with fake_api(says("ok")) as api:
        ask = {"messages": HELLO, "max_tokens": 1}
        ignored = await api.post("chat/completions", **ask, reasoning_effort="high")
        assert ignored.headers["warning"] == '299 manta "ignored: reasoning_effort"'
        monkeypatch.setattr(tokenizer(), "chat_template", template)
        for effort, thinking in (("high", ""), ("none", "False")):
            answer = await api.post("chat/completions", **ask, reasoning_effort=effort)
            assert answer.status_code == 200 and "warning" not in answer.headers
            assert tokenizer().decode(api.engine.added[-1].prompt) == f"{effort} {thinking} hello"
        own = {"reasoning_effort": "mine"}
        await api.post("chat/completions", **ask, reasoning_effort="low", chat_template_kwargs=own)
        assert tokenizer().decode(api.engine.added[-1].prompt).startswith("mine")


@pytest.mark.parametrize("route", ROUTES)
async def test_answers_and_last_chunks_have_the_fingerprint_of_the_model(route):
    async with fake_api(says("ok so"), fingerprint="fp_1") as api:
        body = {**ROUTES[route][2], "max_tokens": 3}
        assert (await api.post(route, **body)).json()["system_fingerprint"] == "fp_1"
        chunks = await api.stream(route, **body)
        assert chunks[-1]["system_fingerprint"] == "fp_1"
        assert not any("system_fingerprint" in chunk for chunk in chunks[:-1])


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
async def test_sampling_field_reaches_the_engine(route, api):
    for name, body in HONOURED.items():
        response = await api.post(route, **{**ROUTES[route][2], "max_tokens": 2, **body})
        assert response.status_code == 200, response.text
        value = getattr(api.engine.added[-1].params, name)
        expected = {5: 1.0} if name == "logit_bias" else body[name]
        assert value == expected, name


@pytest.mark.parametrize("kind", ["input_audio", "video_url", "file"])
def test_a_part_that_is_neither_text_nor_image_is_named(kind):
    content = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "data:,a"}}]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    with pytest.raises(InvalidParameter) as caught:
        parse(ChatBody, body, "ignore")
    assert f"messages[0].content must be a list of texts and images; part [1] is of the unsupported type {kind}" in str(
        caught.value
    )
