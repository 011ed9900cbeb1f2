"""Holds over HTTP, by the real clients of Anthropic and OpenAI: what they ask for, and what they are told."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI

from deployments.frontend.api_keys import hash_key
from deployments.frontend.sequence import RequestUsage
from deployments.http.middleware import AuthConfig
from engine.wire.parts.cache_writes import HoldOutcome
from engine.wire.parts.holds import HoldMark, PromptHold, ReleaseHolds
from engine.wire.token_delta import TokenDelta
from tests.deployments.anthropic.test_messages import TOOLS, serving, text_block
from tests.deployments.fake_api import FakeApi, fake_api, says, until
from tests.deployments.openai.chat_models import DEEPSEEK, LLAMA, QWEN, chat_tokenizer

HOUR: Any = {"type": "ephemeral", "ttl": "1h"}
MINUTES: Any = {"type": "ephemeral"}
ASKED: Any = {"model": "fake", "max_tokens": 5}


def openai_client(api: FakeApi, key: str = "none") -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://fake/v1", api_key=key, http_client=api.client, max_retries=0)


def marked(api: FakeApi, template: str = QWEN) -> list[tuple[str, float]]:
    """The text up to each mark of the newest request, and its seconds."""
    request, decode = api.engine.added[-1], chat_tokenizer(template).decode
    hold = request.record(PromptHold)
    marks = [] if hold is None else hold.marks
    return [(decode(request.prompt[: mark.tokens], skip_special_tokens=False), mark.ttl_s) for mark in marks]


def tokens(api: FakeApi) -> list[int]:
    hold = api.engine.added[-1].record(PromptHold)
    return [] if hold is None else [mark.tokens for mark in hold.marks]


@pytest.mark.parametrize("template", [QWEN, LLAMA, DEEPSEEK])
async def test_anthropics_marks_are_where_the_marked_blocks_end(template):
    async with serving("hi", template) as (client, api):
        await client.messages.create(
            **ASKED,
            system=[{"type": "text", "text": "Be brief.", "cache_control": HOUR}],
            messages=[
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": "hi"},
                {"role": "user", "content": [
                    {"type": "text", "text": "One.", "cache_control": MINUTES}, text_block("Two.")]},
            ],
        )  # fmt: skip
        (first, hour), (second, minutes) = marked(api, template)
        assert (hour, minutes) == (3600.0, 300.0)
        assert first.endswith("Be brief.") and second.endswith("\nOne.") and second.startswith(first)


TRIMS = QWEN.replace("{{- message.content }}", "{{- message.content | trim }}")
HIDES = QWEN.replace("{{- message.content }}", "{{- message.content if message.role != 'system' else 'Hi.' }}")


@pytest.mark.parametrize(
    ("template", "first", "second"),
    [(TRIMS, "system\nBe brief.", "user\nhello"), (HIDES, "user\nBe brief. \n\n", "\n\nhello \n")],
)
async def test_mark_is_found_where_the_template_trims_texts_or_does_not_read_the_role(template, first, second):
    async with serving("hi", template) as (client, api):
        await client.messages.create(
            **ASKED,
            system=[{**text_block("Be brief. \n\n"), "cache_control": HOUR}],
            messages=[{"role": "user", "content": [{**text_block("hello \n"), "cache_control": MINUTES}]}],
        )
        found = [text for text, _ in marked(api, template)]
        assert len(found) == 2 and found[0].endswith(first) and found[1].endswith(second)


async def test_mark_on_a_tool_holds_the_tools_up_to_it_and_one_of_the_request_all_of_it():
    tools: Any = [{**TOOLS[0], "cache_control": HOUR}, {**TOOLS[0], "name": "other"}]
    async with serving("hi") as (client, api):
        await client.messages.create(
            **ASKED, tools=tools, messages=[{"role": "user", "content": "hello"}], cache_control=MINUTES
        )
        (of_tools, _), (whole, _) = marked(api)
        assert '"required": ["city"]}}}' in of_tools and "other" not in of_tools
        assert whole.endswith("user\nhello")
        assert "cache_control" not in chat_tokenizer(QWEN).decode(api.engine.added[-1].prompt)


async def test_mark_on_a_tools_result_is_where_it_ends():
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "snow", "cache_control": MINUTES}
    turns: Any = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    async with serving("hi") as (client, api):
        await client.messages.create(**ASKED, tools=TOOLS, messages=turns)
        ((text, _),) = marked(api)
        assert text.endswith("tool\nsnow")


async def test_usage_tells_anthropics_client_what_was_read_written_and_for_how_long():
    async with serving("hi") as (client, api):
        api.engine.cached_tokens = 3
        asked: Any = {
            **ASKED,
            "system": [{"type": "text", "text": "Be brief, and kind to all.", "cache_control": HOUR}],
            "messages": [{"role": "user", "content": [{**text_block("hello there"), "cache_control": MINUTES}]}],
        }
        message = await client.messages.create(**asked)
        usage, (system, whole) = message.usage, tokens(api)
        assert usage.cache_read_input_tokens == 3
        assert usage.cache_creation_input_tokens == whole - 3
        assert usage.cache_creation is not None
        assert usage.cache_creation.ephemeral_1h_input_tokens == system - 3
        assert usage.cache_creation.ephemeral_5m_input_tokens == whole - system
        assert usage.input_tokens + whole == len(api.engine.added[-1].prompt)
        async with client.messages.stream(**asked) as events:
            first = await anext(aiter(events))
            assert first.type == "message_start" and first.message.usage.cache_creation_input_tokens == whole - 3
            assert (await events.get_final_message()).usage.cache_creation == usage.cache_creation


async def test_refused_hold_is_answered_all_the_same_and_says_why():
    def refuse(mark: HoldMark) -> HoldOutcome:
        return HoldOutcome(tokens=mark.tokens, ttl_s=mark.ttl_s, refusal="full", reason="all holds would keep 9 blocks")

    async with serving("hi") as (client, api):
        api.engine.hold_answer = refuse
        turns: Any = [{"role": "user", "content": "hello"}]
        message = await client.messages.create(**ASKED, messages=turns, cache_control=HOUR)
        usage = message.usage.model_dump()
        assert message.content and usage["cache_creation_input_tokens"] == 0
        assert usage["input_tokens"] == len(api.engine.added[-1].prompt)
        expected = {"status": "refused", "tokens": tokens(api)[0], "ttl_s": 3600.0, "code": "full",
                    "reason": "all holds would keep 9 blocks"}  # fmt: skip
        assert usage["holds"] == [expected]
        chat = await openai_client(api).chat.completions.create(
            model="fake", messages=turns, prompt_cache_retention="24h"
        )
        assert chat.usage and chat.usage.prompt_tokens_details
        assert chat.usage.prompt_tokens_details.cache_write_tokens == 0
        assert chat.usage.model_dump()["holds"] == [{**expected, "ttl_s": 86400.0}]


async def test_request_without_marks_asks_for_nothing_and_is_told_nothing():
    async with serving("hi") as (client, api):
        message = await client.messages.create(**ASKED, messages=[{"role": "user", "content": "hello"}])
        assert api.engine.added[-1].record(PromptHold) is None
        assert message.usage.cache_creation is None and "holds" not in message.usage.model_dump()


@pytest.mark.parametrize(
    ("fields", "ttl_s"),
    [
        ({"prompt_cache_retention": "24h"}, 86_400.0),
        ({"prompt_cache_retention": "in_memory"}, None),
        ({"prompt_cache_options": {"ttl": "30m"}}, 1_800.0),
        ({"prompt_cache_options": {"mode": "explicit"}}, None),
        ({"extra_body": {"hold_s": 90}}, 90.0),
        ({}, None),
    ],
)
async def test_openais_fields_ask_for_a_hold_in_all_three_apis(fields, ttl_s):
    async with serving("hi") as (_, api):
        client = openai_client(api)
        turns: Any = [{"role": "user", "content": "hello"}]
        await client.chat.completions.create(model="fake", messages=turns, prompt_cache_key="talk", **fields)
        expected = [] if ttl_s is None else [("<|im_start|>user\nhello", ttl_s)]
        assert marked(api) == expected
        assert ttl_s is None or api.engine.added[-1].record(PromptHold).name == "talk"
        response = await client.responses.create(model="fake", input="hello", **fields)
        assert marked(api) == expected
        assert response.usage is not None
        assert response.usage.input_tokens_details.cache_write_tokens == sum(tokens(api))
        text_fields = {"extra_body": fields.get("extra_body", fields)}
        await client.completions.create(model="fake", prompt="hello", **text_fields)
        assert [t for _, t in marked(api)] == ([] if ttl_s is None else [ttl_s])


async def test_openais_breakpoints_are_marks_with_the_time_of_their_own_or_of_the_request():
    def part(text: str, **point: str) -> dict[str, Any]:
        return {"type": "text", "text": text, "prompt_cache_breakpoint": {"mode": "explicit", **point}}

    async with serving("hi") as (_, api):
        turns: Any = [
            {"role": "system", "content": [part("Be brief.", ttl="12h")]},
            {"role": "user", "content": [part("hello")]},
        ]
        options: Any = {"mode": "explicit"}
        await openai_client(api).chat.completions.create(model="fake", messages=turns, prompt_cache_options=options)
        (first, long), (second, short) = marked(api)
        assert (long, short) == (43_200.0, 1_800.0)
        assert first.endswith("Be brief.") and second.endswith("hello")


async def test_prompts_of_several_answers_are_held_once():
    async with fake_api(says("hi")) as api:
        await api.post("completions", prompt=["hello", "world"], n=2, hold_s=9, max_tokens=2)
        assert [request.record(PromptHold) is not None for request in api.engine.added] == [True, False, True, False]


async def test_more_marks_than_four_and_times_that_no_api_has_are_refused():
    async with serving("hi") as (_, api):
        blocks = [{**text_block(str(i)), "cache_control": MINUTES} for i in range(5)]
        many = await api.post("messages", max_tokens=5, messages=[{"role": "user", "content": blocks}])
        assert many.status_code == 400
        assert many.json()["error"]["message"] == "cache_control must be at most 4 in a request, got 5"
        turns = [{"role": "user", "content": "hello"}]
        for field, value in (("cache_control", {"type": "ephemeral", "ttl": "2h"}), ("hold_s", 0)):
            refused = await api.post("chat/completions", messages=turns, **{field: value})
            assert refused.status_code == 400 and field in refused.json()["error"]["message"]


async def test_hold_ends_by_its_name_and_with_the_response_that_is_deleted():
    async with serving("hi") as (_, api):
        client = openai_client(api)
        response = await client.responses.create(model="fake", input="hello", prompt_cache_retention="24h")
        assert api.engine.added[-1].record(PromptHold) is not None
        assert api.engine.added[-1].record(PromptHold).response_id == response.id
        await client.responses.delete(response.id)
        answer = await api.client.delete("/v1/holds/talk/1")
        assert answer.json() == {"id": "talk/1", "object": "hold", "deleted": True}
        await until(lambda: len(api.engine.released) == 2)
        assert api.engine.released == [ReleaseHolds(response.id), ReleaseHolds("talk/1")]


async def test_an_api_key_ends_its_own_holds_only(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"alice:{hash_key('sk-a')}\n")
    async with fake_api(says("hi"), auth=AuthConfig(api_keys_file=str(file))) as api:
        assert (await api.client.delete("/v1/holds/talk")).status_code == 401
        headers = {"Authorization": "Bearer sk-a"}
        assert (await api.client.delete("/v1/holds/talk", headers=headers)).status_code == 200
        await until(lambda: api.engine.released)
        assert api.engine.released == [ReleaseHolds("talk", "key:alice")]


def test_tokens_of_a_hold_that_another_engine_granted_anew_are_counted_once():
    usage = RequestUsage(prompt_tokens=30, cached_tokens=10)
    outcome = HoldOutcome(tokens=20, ttl_s=300.0)
    usage.count_holds(0, TokenDelta(request_id="r", num_cached_tokens=10).telling(outcome))
    usage.count_holds(0, TokenDelta(request_id="r", num_cached_tokens=0).telling(outcome))
    assert (usage.held_tokens(), usage.held_tokens(0, 299)) == (10, 0)
