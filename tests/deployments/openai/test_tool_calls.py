"""Tool calls and reasoning over HTTP, through real templates and tokenizers and by the official client."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import AsyncOpenAI

from engine.text.chat_tokenizer import ChatTokenizer
from engine.wire.parts.thinking_budget import ThinkingBudget
from tests.deployments.fake_api import FakeApi, fake_api
from tests.deployments.openai.chat_models import DEEPSEEK, LLAMA, QWEN, VOCAB_SIZE, answers, chat_tokenizer
from tests.models import CHAT_TEMPLATE

HELLO = [{"role": "user", "content": "hello"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
ARGUMENTS = '{"city": "Zürich"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


@asynccontextmanager
async def serving(
    text: str = "", template: str = QWEN, *, markers: str = "tokens", ended: bool = True, **info: Any
) -> AsyncGenerator[FakeApi]:
    """Run an API whose model answers `text`."""
    tokenizer = chat_tokenizer(template, markers)
    script = answers(tokenizer, text, ended=ended)
    async with fake_api(script, text_model=tokenizer, vocab_size=VOCAB_SIZE, step_ms=1, **info) as api:
        yield api


async def ask(api: FakeApi, **body: Any) -> dict[str, Any]:
    """Return the only choice of the response, without keys of its message that are always null here."""
    response = await api.post("chat/completions", **{"messages": HELLO, **body})
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    told = {name: value for name, value in choice["message"].items() if value is not None}
    return {**choice, "message": {"content": None, "refusal": None, **told}}


async def ask_streamed(api: FakeApi, **body: Any) -> dict[str, Any]:
    """Return the only choice of a stream, put together chunk by chunk as OpenAI's clients do."""
    message: dict[str, Any] = {"role": None, "content": None, "refusal": None}
    calls: list[dict[str, Any]] = []
    reason = None
    for chunk in await api.stream("chat/completions", **{"messages": HELLO, **body}):
        (choice,) = chunk["choices"]
        delta, reason = choice["delta"], choice["finish_reason"]
        for name in delta.keys() - {"tool_calls"}:
            if delta[name] is not None:
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", []):
            if call["index"] == len(calls):
                assert call["id"] and call["type"] == "function" and call["function"]["name"]
                calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
            else:
                assert call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
    return {"message": message, "finish_reason": reason}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message without its call ids, and with empty content as None: streams begin with an empty one."""
    for call in message.get("tool_calls", []):
        assert call.pop("id").startswith("call_")
    return {**message, "content": message["content"] or None}


def message(content: str | None = None, *calls: tuple[str, str], **fields: Any) -> dict[str, Any]:
    shown = [{"type": "function", "function": {"name": name, "arguments": text}} for name, text in calls]
    return {
        "role": "assistant",
        "content": content,
        "refusal": None,
        **fields,
        **({"tool_calls": shown} if calls else {}),
    }


WEATHER = ("weather", ARGUMENTS)
LLAMA_CALL = f'{{"name": "weather", "parameters": {ARGUMENTS}}}'
ANSWERS = [
    (QWEN, CALL, {}, message(None, WEATHER), "tool_calls"),
    (QWEN, f"Let me see.\n{CALL}\n{CALL}", {}, message("Let me see.", WEATHER, WEATHER), "tool_calls"),
    (QWEN, f"{CALL}\n{CALL}", {"parallel_tool_calls": False}, message(None, WEATHER), "tool_calls"),
    (QWEN, f"<think>\nhm\n</think>\n\n{CALL}", {}, message(None, WEATHER, reasoning="hm"), "tool_calls"),
    (QWEN, "no <tool_call> at all", {}, message("no <tool_call> at all"), "stop"),
    (QWEN, CALL, {"tool_choice": "none"}, message(CALL), "stop"),
    (QWEN, f"[{LLAMA_CALL}]", {"tool_choice": "required"}, message(None, WEATHER), "tool_calls"),
    (QWEN, ARGUMENTS, {"tool_choice": NAMED}, message(None, WEATHER), "stop"),
    (LLAMA, LLAMA_CALL, {}, message(None, WEATHER), "tool_calls"),
    (LLAMA, f"{LLAMA_CALL}; {LLAMA_CALL}", {}, message(None, WEATHER, WEATHER), "tool_calls"),
    (LLAMA, '{"name": "Zoe"}', {}, message('{"name": "Zoe"}'), "stop"),
]


@pytest.mark.parametrize(("template", "text", "fields", "expected", "reason"), ANSWERS)
async def test_calls_are_told_from_content_in_streams_and_whole_answers(template, text, fields, expected, reason):
    async with serving(text, template) as api:
        for way in (ask, ask_streamed):
            choice = await way(api, tools=TOOLS, **fields)
            assert without_ids(choice["message"]) == expected, way
            assert choice["finish_reason"] == reason, way


@pytest.mark.parametrize("markers", ["tokens", "special", "text"])
async def test_tags_are_found_whether_they_are_tokens_special_tokens_or_text(markers):
    async with serving(f"<think>hm</think>{CALL}", markers=markers) as api:
        for way in (ask, ask_streamed):
            assert without_ids((await way(api, tools=TOOLS))["message"]) == message(None, WEATHER, reasoning="hm")


async def test_answer_cut_by_max_tokens_says_so():
    async with serving(CALL[:-30], ended=False) as api:
        whole, streamed = await ask(api, tools=TOOLS), await ask_streamed(api, tools=TOOLS)
        for choice in (whole, streamed):
            assert choice["finish_reason"] == "length"
            assert ARGUMENTS.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


async def test_choices_of_one_stream_count_their_calls_for_themselves():
    async with serving(f"{CALL}{CALL}") as api:
        chunks = await api.stream("chat/completions", messages=HELLO, tools=TOOLS, n=2)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        for index in (0, 1):
            deltas = [choice["delta"] for choice in choices if choice["index"] == index]
            calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
            assert sorted({call["index"] for call in calls}) == [0, 1]
            assert len({call["id"] for call in calls if "id" in call}) == 2


def prompt_of(api: FakeApi, tokenizer: ChatTokenizer) -> str:
    return tokenizer.decode(api.engine.added[-1].prompt, skip_special_tokens=False)


async def test_prompt_shows_tools_calls_and_their_results():
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    cut = {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": '{"a'}}
    conversation = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call, cut], "reasoning": "hm", "function_call": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "assistant", "content": "It rains.", "tool_calls": []},
        *HELLO,
    ]
    async with serving("hi") as api:
        await ask(api, messages=conversation, tools=TOOLS)
        prompt = prompt_of(api, chat_tokenizer(QWEN))
        tools = "\n".join(json.dumps(tool) for tool in TOOLS)
        assert prompt == (
            f"<|im_start|>system\n<tools>\n{tools}\n</tools><|im_end|>\n"
            "<|im_start|>user\nhello<|im_end|>\n"
            f"<|im_start|>assistant\n<think>\nhm\n</think>\n\n\n{CALL}\n"
            '<tool_call>\n{"name": "now", "arguments": "{\\"a"}\n</tool_call><|im_end|>\n'
            "<|im_start|>tool\nrain<|im_end|>\n"
            "<|im_start|>assistant\nIt rains.<|im_end|>\n"
            "<|im_start|>user\nhello<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        await ask(api, tools=TOOLS, tool_choice="none")
        assert "weather" not in prompt_of(api, chat_tokenizer(QWEN))


async def test_template_that_looks_for_the_key_sees_no_empty_list_of_calls():
    async with serving("hi", LLAMA) as api:
        for calls in ([], None):
            turn = {"role": "assistant", "content": "yes", "tool_calls": calls}
            await ask(api, messages=[*HELLO, turn, *HELLO])


async def test_forced_calls_are_held_to_the_schema_of_the_tools():
    async with serving("[]") as api:
        thinks_not = {"chat_template_kwargs": {"enable_thinking": False}}
        await ask(api, tools=TOOLS, tool_choice="required", **thinks_not)
        grammar = api.engine.added[-1].params.structured_outputs.grammar
        (schema,) = schemas_in(grammar)
        names = [call["properties"]["name"] for call in schema["items"]["anyOf"]]
        assert (schema["minItems"], names) == (1, [{"const": "weather"}, {"const": "now"}])
        await ask(api, tools=TOOLS, tool_choice=NAMED, **thinks_not)
        grammar = api.engine.added[-1].params.structured_outputs.grammar
        (schema,) = schemas_in(grammar)
        assert schema.items() >= {**PARAMETERS, "additionalProperties": False}.items()
        await ask(api, tools=TOOLS, tool_choice=NAMED)  # it may think first
        assert "start: ((<" in api.engine.added[-1].params.structured_outputs.grammar
        await ask(api, tools=TOOLS)
        assert api.engine.added[-1].params.structured_outputs is None


def schemas_in(grammar: str) -> list[dict[str, Any]]:
    return [json.JSONDecoder().raw_decode(grammar[found.end() :])[0] for found in re.finditer("%json ", grammar)]


@pytest.mark.parametrize("closed", [True, False])
async def test_what_the_ingress_writes_of_schemas_is_closed_or_open_as_the_model_is_configured(closed):
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": PARAMETERS}}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
    async with serving("{}", closed_objects=closed) as api:
        for form in ({"tools": TOOLS, "tool_choice": NAMED}, {"tools": TOOLS, "response_format": schema}):
            await ask(api, **form)
            grammar = api.engine.added[-1].params.structured_outputs.grammar
            schemas = schemas_in(grammar)
            assert [s.get("additionalProperties") for s in schemas if "properties" in s] == [False if closed else None]
        await api.post("completions", prompt="x", response_format=tag)
        assert ("additionalProperties" in api.engine.added[-1].params.structured_outputs.grammar) == closed


THOUGHTS, REST = "\nHm, 1 + 1.\n", "\n\nIt is 2."


@pytest.mark.parametrize(
    ("template", "text", "fields", "expected"),
    [
        (QWEN, f"<think>{THOUGHTS}</think>{REST}", {}, message("It is 2.", reasoning="Hm, 1 + 1.")),
        (DEEPSEEK, f"{THOUGHTS}</think>{REST}", {}, message("It is 2.", reasoning="Hm, 1 + 1.")),
        (DEEPSEEK, THOUGHTS, {}, message(None, reasoning="Hm, 1 + 1.")),
        (QWEN, "It is 2.", {}, message("It is 2.")),
        (QWEN, f"<think>{THOUGHTS}</think>{REST}", {"include_reasoning": False}, message("It is 2.")),
    ],
)
async def test_reasoning_has_a_field_of_its_own_and_its_tokens_are_counted(template, text, fields, expected):
    async with serving(text, template) as api:
        for way in (ask, ask_streamed):
            assert without_ids((await way(api, **fields))["message"]) == expected
        whole = (await api.post("chat/completions", messages=HELLO)).json()["usage"]
        options = {"include_usage": True}
        *_, last = await api.stream("chat/completions", messages=HELLO, stream_options=options)
        tokenizer = chat_tokenizer(template)
        reasoned = len(tokenizer.encode(THOUGHTS, False)) if THOUGHTS in text else 0
        assert whole["completion_tokens_details"]["reasoning_tokens"] == reasoned
        assert last["usage"] == whole
        assert whole["completion_tokens"] == len(tokenizer.encode(text, False)) + 1


async def test_reasoning_stays_in_the_content_where_no_parser_is_configured():
    async with serving("<think>a</think>b", reasoning_parser="none") as api:
        response = (await api.post("chat/completions", messages=HELLO)).json()
        told = response["choices"][0]["message"]
        assert (told["content"], told["reasoning"]) == ("<think>a</think>b", None)
        assert response["usage"]["completion_tokens_details"] is None


@pytest.mark.parametrize(
    ("template", "fields", "begins"),
    [(QWEN, {}, True), (QWEN, {"chat_template_kwargs": {"enable_thinking": False}}, True), (DEEPSEEK, {}, False)],
)
async def test_budget_of_reasoning_goes_to_the_engine_with_the_tokens_of_the_tags(template, fields, begins):
    async with serving("</think>hi", template) as api:
        body = {"messages": HELLO, "thinking_token_budget": 9, **fields}
        response = await api.post("chat/completions", **body)
        assert "warning" not in response.headers
        tokenizer = chat_tokenizer(template)
        opening, closing = (tokenizer.encode(tag, False)[0] for tag in ("<think>", "</think>"))
        expected = ThinkingBudget(9, closing, opening if begins else None)
        assert ThinkingBudget.of(api.engine.added[0].params) == expected


async def test_budget_of_reasoning_ends_at_a_call():
    async with serving("</think>hi") as api:
        await api.post("chat/completions", messages=HELLO, thinking_token_budget=9, tools=TOOLS)
        (call,) = chat_tokenizer(QWEN).encode("<tool_call>", False)
        budget = ThinkingBudget.of(api.engine.added[0].params)
        assert budget is not None and budget.call == call


@pytest.mark.parametrize(("template", "markers"), [(LLAMA, "tokens"), (QWEN, "text")])
async def test_budget_of_reasoning_is_ignored_with_a_warning_where_its_end_is_no_token(template, markers):
    async with serving("hi", template, markers=markers) as api:
        response = await api.post("chat/completions", messages=HELLO, thinking_token_budget=9)
        assert response.headers["warning"] == '299 manta "ignored: thinking_token_budget"'
        assert ThinkingBudget.of(api.engine.added[0].params) is None


async def test_official_client_reads_calls_and_reasoning():
    async with serving(f"<think>hm</think>Wait.\n{CALL}") as api:
        client = AsyncOpenAI(base_url="http://fake/v1", api_key="none", http_client=api.client)
        completion = await client.chat.completions.create(model="fake", messages=HELLO, tools=TOOLS)
        (call,) = completion.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == WEATHER
        assert completion.choices[0].message.reasoning == "hm"
        assert completion.usage.completion_tokens_details.reasoning_tokens > 0
        events = []
        async with client.chat.completions.stream(model="fake", messages=HELLO, tools=TOOLS) as stream:
            async for event in stream:
                events.append(event.type)
            final = await stream.get_final_completion()
        choice = final.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Wait.")
        assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [WEATHER]
        assert "tool_calls.function.arguments.delta" in events


BAD = [
    (QWEN, {"tools": [{"type": "function"}]}, "tools"),
    (QWEN, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools"),
    (QWEN, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    (QWEN, {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
    (QWEN, {"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name"),
    (
        QWEN,
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
        "tools[0].function.parameters",
    ),
    (QWEN, {"tool_choice": "required"}, "tool_choice"),
    (QWEN, {"tool_choice": NAMED}, "tool_choice"),
    (QWEN, {"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    (QWEN, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    (QWEN, {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
    (QWEN, {"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    (QWEN, {"functions": [{"name": "f"}]}, "functions"),
    (QWEN, {"function_call": {"name": "f"}}, "function_call"),
    (QWEN, {"messages": [*HELLO, {"role": "assistant", "function_call": {"arguments": ""}}]}, "messages"),
    (QWEN, {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages"),
    (QWEN, {"chat_template_kwargs": {"tools": TOOLS}}, "chat_template_kwargs"),
    (LLAMA, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 2}]}, "messages"),
    (CHAT_TEMPLATE, {"tools": TOOLS}, "tools"),
    (QWEN.replace("<tool_call>", "<call>"), {"tools": TOOLS}, "tool_choice"),
]


@pytest.mark.parametrize(("template", "body", "field"), BAD)
async def test_bad_tools_are_a_400_that_names_the_field(template, body, field):
    async with serving("hi", template) as api:
        for stream in (True, False):
            response = await api.post("chat/completions", **{"messages": HELLO, **body}, stream=stream)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["param"] in (field, field.partition("[")[0]) and field in error["message"], error
        assert not api.engine.added


async def test_legacy_fields_are_answered_with_what_replaced_them():
    async with serving("hi") as api:
        for field, instead in (("functions", "tools"), ("function_call", "tool_choice")):
            response = await api.post("chat/completions", messages=HELLO, **{field: {"name": "f"}})
            assert f"use {instead}" in response.json()["error"]["message"]


async def test_known_call_format_is_not_needed_where_a_call_is_forced():
    async with serving(ARGUMENTS, tool_call_parser="none") as api:
        choice = await ask(api, tools=TOOLS, tool_choice=NAMED)
        assert without_ids(choice["message"]) == message(None, WEATHER)


async def test_empty_list_of_tools_counts_as_none(api):
    hello = [{"role": "user", "content": "hello"}]
    for tools in ({"tools": []}, {}, {"tools": [], "tool_choice": "auto"}):
        response = await api.post("chat/completions", messages=hello, max_tokens=1, **tools)
        assert response.status_code == 200, response.text
    assert len({tuple(request.prompt) for request in api.engine.added}) == 1


HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    f"<|constrain|>json<|message|>{ARGUMENTS}"
)
MISTRAL = f"[THINK]Hm.[/THINK][TOOL_CALLS]weather[ARGS]{ARGUMENTS}"


@pytest.mark.parametrize(
    ("text", "parsers", "id_length"),
    [(HARMONY, ("openai", "openai_gptoss"), 29), (MISTRAL, ("mistral", "mistral"), 9)],
)
@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
async def test_special_tokens_that_call_tools_are_read_whatever_the_choice(text, parsers, id_length, choice):
    names = dict(zip(("tool_call_parser", "reasoning_parser"), parsers, strict=True))
    async with serving(text, markers="special", **names) as api:
        for answer in (
            await ask(api, tools=TOOLS, tool_choice=choice),
            await ask_streamed(api, tools=TOOLS, tool_choice=choice),
        ):
            message = answer["message"]
            (call,) = message["tool_calls"]
            assert call["function"] == {"name": "weather", "arguments": ARGUMENTS}
            assert len(call["id"]) == id_length
            assert (message["reasoning"], message["content"] or "") == ("Hm.", "")
            assert answer["finish_reason"] == ("stop" if choice is NAMED else "tool_calls")
        grammar = api.engine.added[-1].params.structured_outputs
        assert (grammar is None) == (choice == "auto")
