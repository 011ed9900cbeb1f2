"""What becomes of each field of a request, and which errors name which of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from openai.types.responses import ResponseIncludable, response_create_params

from deployments.openai.responses.request_body import RESPONSES_FOREIGN_FIELDS as FOREIGN
from deployments.openai.responses.request_body import Include, ResponsesBody
from tests.deployments.bodies import BODIES
from tests.deployments.openai.bad_requests import Bad
from tests.deployments.openai.responses.serving import (
    ARGUMENTS,
    CALL,
    PARAMETERS,
    WEATHER,
    ask,
    ask_streamed,
    prompt,
    serving,
)

# vLLM 0.32's, beside OpenAI's and those that ours have
VLLM = {
    *{"cache_salt", "chat_template", "chat_template_kwargs", "enable_response_messages", "ignore_eos"},
    *{"include_stop_str_in_output", "kv_transfer_params", "logit_bias", "media_io_kwargs", "mm_processor_kwargs"},
    *{"presence_penalty", "frequency_penalty", "previous_input_messages", "priority", "repetition_penalty"},
    *{"request_id", "seed", "skip_special_tokens", "stop", "structured_outputs", "top_k", "vllm_xargs"},
}
DEFINED = {*get_type_hints(response_create_params.ResponseCreateParamsStreaming), *VLLM, *FOREIGN.unused}
KNOWN = set(BODIES.kind(ResponsesBody).model_fields)


def test_every_field_of_openai_s_and_vllm_s_is_obeyed_or_ignored_or_refused_for_a_reason():
    assert {*FOREIGN.ignored, *FOREIGN.refused, *FOREIGN.unused} == DEFINED - KNOWN
    assert set(get_args(ResponseIncludable)) == set(get_args(Include))


def test_the_documentation_says_of_every_field_what_becomes_of_it():
    page = (Path(__file__).parents[4] / "docs" / "responses.md").read_text()
    for name in KNOWN:
        assert f"`{name}`" in page, name
    for name, reason in {**FOREIGN.ignored, **FOREIGN.refused, **FOREIGN.unused}.items():
        assert f"| `{name}` | {reason} |" in page, name


async def test_a_field_that_has_no_effect_is_named_in_a_warning():
    fields: list[tuple[str, Any]] = [
        *[(name, {name: {"a": "b"}}) for name in FOREIGN.ignored],
        ("nonsense", {"nonsense": 1}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("text.verbosity", {"text": {"verbosity": "low"}}),
        ("reasoning.summary", {"reasoning": {"summary": "auto"}}),
        ("reasoning.effort", {"reasoning": {"effort": "low"}}),
        ("tools.web_search", {"tools": [{"type": "web_search", "external_web_access": False}]}),
        ("tools.web_search_preview_2025_03_11", {"tools": [{"type": "web_search_preview_2025_03_11"}]}),
        ("service_tier", {"service_tier": "flex"}),
        ("request_id", {"request_id": "a"}),
        ("stream_options.include_obfuscation", {"stream": True, "stream_options": {"include_obfuscation": True}}),
    ]
    async with serving("a") as api:
        for name, body in fields:
            answer = await api.post("responses", input="a", **body)
            assert answer.status_code == 200, (name, answer.text)
            assert answer.headers["warning"] == f'299 manta "ignored: {name}"'
        quiet = dict.fromkeys(DEFINED) | {"input": "a", "text": {"verbosity": "medium"}, "truncation": "disabled"}
        answer = await api.post("responses", **quiet, **dict.fromkeys(["nonsense"]))
        assert answer.status_code == 200 and "warning" not in answer.headers


TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
LONG = "a" * 20_000
IMAGE = {"type": "input_image", "image_url": "data:"}
FILE = {"type": "input_image", "file_id": "file-1"}
BAD: list[tuple[dict[str, Any], str, str]] = [  # body, param, part of the message
    *[({"input": "a", name: {"a": "b"}}, name, reason) for name, reason in FOREIGN.refused.items()],
    ({}, "input", "input is required"),
    ({"input": ""}, "input", "not empty"),
    ({"input": []}, "input", "not empty"),
    ({"input": 5}, "input", "valid string"),
    ({"input": [{"role": "user", "content": "a"}] * 4097}, "input", "at most 4096 items"),
    ({"input": [{"role": "user"}]}, "input", "input[0].content is required"),
    ({"input": [{"role": "boss", "content": "a"}]}, "input", "input[0].role must be 'user', 'assistant'"),
    ({"input": [{"role": "user", "content": [FILE]}]}, "input", "an image with a URL in image_url (Field required)"),
    (
        {"input": [{"role": "user", "content": [IMAGE]}]},
        "input",
        "input[0].content[0].input_image must be text, because model",
    ),
    ({"input": [{"type": "computer_call"}]}, "input", "input[0].type must be message, reasoning"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input", "input[0].call_id is required"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "input[0].id must be the id of an item"),
    ({"input": "a", "tools": [{"type": "mcp", "server_url": "http://a"}]}, "tools", "tools[0].type must be function"),
    ({"input": "a", "tools": [{"type": "custom", "name": "f"}]}, "tools", "this server has no tools of its own"),
    ({"input": "a", "tools": [{"type": "web_search"}, {**TOOL, "name": "a b"}]}, "tools", "tools[1].name must be"),
    ({"input": "a", "tools": [{"type": "web_search"}, TOOL, TOOL]}, "tools", "tools[2].name must be different"),
    ({"input": "a", "tools": [{**TOOL, "parameters": {"type": "array"}}]}, "tools", "tools[0].parameters must be"),
    (
        {
            "input": "a",
            "tools": [{"type": "namespace", "name": "n", "tools": [{**TOOL, "parameters": {"type": "null"}}]}],
        },
        "tools",
        "tools[0].tools[0].parameters must be",
    ),
    (
        {"input": "a", "tools": [{**TOOL, "strict": True, "parameters": {"type": "object", "$ref": "#/nowhere"}}]},
        "tools",
        "tools[0].parameters must be a JSON schema",
    ),
    ({"input": "a", "tool_choice": "required"}, "tool_choice", "if the request has no tools"),
    ({"input": "a", "tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "(f)"),
    ({"input": "a", "tool_choice": {"type": "file_search"}}, "tool_choice", "function or allowed_tools"),
    (
        {"input": "a", "tool_choice": {"type": "function"}},
        "tool_choice",
        "tool_choice.name is required",
    ),
    (
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "a"}}},
        "text",
        "text.format.schema is required",
    ),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be at least 1"),
    ({"input": "a", "max_output_tokens": 10**6}, "max_output_tokens", "at most the model's context"),
    ({"input": "a", "temperature": -1}, "temperature", "temperature must be"),
    ({"input": "a", "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"input": "a", "include": ["everything"]}, "include", "message.output_text.logprobs"),
    ({"input": "a", "metadata": {"a": 1}}, "metadata", "valid string"),
    ({"input": "a", "metadata": {str(i): "" for i in range(17)}}, "metadata", "at most 16"),
    ({"input": "a", "stream": False, "stream_options": {}}, "stream_options", "stream=true"),
    ({"input": "a", "model": "other"}, "model", "does not exist"),
    ({"input": LONG}, "prompt", "this model's maximum context length is 4096 tokens"),
    ({"input": "a", "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "variables that are not fields"),
]


async def test_a_bad_request_is_a_400_that_names_the_field_as_it_is_called_here():
    async with serving("a") as api:
        for body, param, message in BAD:
            for stream in (True, False):
                answer = await api.post("responses", **{"stream": stream, **body})
                status = 404 if param == "model" else 400
                Bad("/v1/responses", b"", param, status).check(answer)
                assert message in answer.json()["error"]["message"], answer.text
        assert not api.engine.added


async def test_items_become_the_messages_that_the_model_was_trained_on():
    items = [
        {
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be brief."}, {"type": "text", "text": "Now."}],
        },
        {"role": "system", "content": "In verse."},
        {"type": "message", "role": "user", "content": "hello", "id": "msg_1", "status": "completed"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}], "id": "rs_1"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Well.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": ARGUMENTS, "status": None},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "sunny"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "developer", "content": "Later."},
        {"role": "user", "content": "and?"},
    ]
    async with serving("a") as api:
        await ask(api, input=items, instructions="You are Manta.")
        assert prompt(api) == (
            "<|im_start|>system\nYou are Manta.<|im_end|>\n<|im_start|>system\nBe brief.\nNow.<|im_end|>\n"
            "<|im_start|>system\nIn verse.<|im_end|>\n"
            "<|im_start|>user\nhello<|im_end|>\n"
            f"<|im_start|>assistant\n<think>\nhm\n</think>\n\nWell.\n{CALL}<|im_end|>\n"
            "<|im_start|>tool\nsunny<|im_end|>\n"
            "<|im_start|>assistant\nNo.<|im_end|>\n"
            "<|im_start|>system\nLater.<|im_end|>\n"
            "<|im_start|>user\nand?<|im_end|>\n"
            "<|im_start|>assistant\n"
        )


async def test_instructions_of_an_earlier_response_do_not_apply_any_more():
    async with serving("a") as api:
        made = await ask(api, instructions="In verse.")
        await ask(api, previous_response_id=made["id"], instructions="Be brief.")
        assert "In verse." not in prompt(api) and "Be brief." in prompt(api)


async def test_reasoning_comes_back_by_a_client_that_keeps_only_its_encrypted_content():
    async with serving("<think>\nhm\n</think>\n\nGood day.") as api:
        made = await ask(api, include=["reasoning.encrypted_content"], store=False)
        reasoning, message = made["output"]
        assert reasoning["encrypted_content"] == "manta:hm"
        del reasoning["content"]
        theirs = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAB"}
        turn = {"role": "user", "content": "and?"}
        await ask(api, input=[turn, reasoning, message, turn, theirs, message, turn])
        assert prompt(api).count("<think>\nhm\n</think>\n\nGood day.") == 1
        assert prompt(api).count("Good day.") == 2 and "gAAAAB" not in prompt(api)


async def test_a_function_of_a_namespace_is_called_by_its_own_name():
    text = CALL.replace("weather", "n.weather")
    tools = [{"type": "namespace", "name": "n", "description": "d", "tools": [WEATHER]}, {**WEATHER, "name": "now"}]
    async with serving(text) as api:
        made = await ask(api, tools=tools)
        (call,) = made["output"]
        assert (call["namespace"], call["name"]) == ("n", "weather") and made["tools"] == tools
        await ask(api, tools=tools, input=[{"role": "user", "content": "hello"}, call])
        assert text in prompt(api)
        choice = {"type": "function", "name": "weather", "namespace": "n"}
        await ask(api, tools=tools, tool_choice=choice)


async def test_allowed_tools_are_all_that_the_model_is_told_of():
    tools = [WEATHER, {**WEATHER, "name": "now"}]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
    async with serving("a") as api:
        made = await ask(api, tools=tools, tool_choice=allowed)
        assert '"now"' in prompt(api) and '"weather"' not in prompt(api)
        assert made["tool_choice"] == allowed


@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
async def test_a_text_format_is_enforced(kind):
    wanted = {"type": kind} | ({"name": "a", "schema": PARAMETERS} if kind == "json_schema" else {})
    async with serving("{}") as api:
        made = await ask(api, text={"format": wanted})
        assert made["text"]["format"] == wanted
        assert api.engine.added[0].params.structured_outputs is not None


async def test_sampling_parameters_reach_the_engine_and_are_shown_in_the_response():
    async with serving("a") as api:
        fields = {"temperature": 0.5, "top_p": 0.25, "max_output_tokens": 7, "metadata": {"k": "v"}, "user": "u"}
        made = await ask(api, **fields, top_k=3, seed=4)
        params = api.engine.added[0].params
        assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.25, 3, 4)
        assert params.max_tokens == 7
        assert {name: made[name] for name in fields} == fields


async def test_an_input_that_is_too_long_is_cut_off_if_the_request_says_so():
    async with serving("a") as api:
        made = await ask(api, input=LONG, truncation="auto", max_output_tokens=8)
        assert made["truncation"] == "auto" and made["usage"]["input_tokens"] == 4096 - 8
        assert prompt(api).endswith("a<|im_end|>\n<|im_start|>assistant\n")


async def test_log_probabilities_are_those_of_the_text():
    async with serving("<think>\nhm\n</think>\n\nGood") as api:
        body = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
        part = (await ask(api, **body))["output"][1]["content"][0]
        assert "".join(entry["token"] for entry in part["logprobs"]).endswith("Good")
        events = await ask_streamed(api, **body)
        streamed = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
        assert [entry for entries in streamed for entry in entries] == part["logprobs"]
        assert all(entry["top_logprobs"] for entry in part["logprobs"])


async def test_a_body_is_json():
    async with serving("a") as api:
        answer = await api.client.post("/v1/responses", content=json.dumps({"input": "a"}))
        assert answer.status_code == 415
