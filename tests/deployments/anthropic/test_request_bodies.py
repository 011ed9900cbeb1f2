"""What becomes of each field. Anthropic's fields are those of its package: a new one fails here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from deployments.anthropic.request_bodies import FOREIGN_FIELDS as FOREIGN
from deployments.anthropic.request_bodies import CountTokensBody, MessagesBody
from deployments.http.body import parse
from deployments.openai.chat_body import ChatBody
from engine.errors import RequestError
from tests.deployments.fake_api import fake_api, says

HEADERS = {"betas", "user_profile_id", "workspace_id"}  # of the client's methods, not of the body
PAGE = (Path(__file__).parents[3] / "docs" / "anthropic.md").read_text()
BODY: dict[str, Any] = {"max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def test_every_field_of_anthropics_is_obeyed_or_ignored_or_refused_for_a_reason_that_the_documentation_gives():
    from anthropic.types.beta.message_create_params import MessageCreateParamsStreaming as Beta
    from anthropic.types.message_create_params import MessageCreateParamsStreaming as Stable

    names = {*get_type_hints(Stable), *get_type_hints(Beta), "output_format"} - HEADERS
    tables = {**FOREIGN.unused, **FOREIGN.ignored, **FOREIGN.refused}
    assert tables.keys() == names - MessagesBody.model_fields.keys()
    for name in names:
        assert f"| `{name}` | {tables[name]} |" in PAGE if name in tables else f"`{name}`" in PAGE, name


async def test_field_is_ignored_with_a_warning_or_refused_with_the_reason():
    async with fake_api(says("ok")) as api:
        for name in FOREIGN.ignored | FOREIGN.unused:
            response = await api.post("messages", **BODY, **{name: {"a": "b"}})
            assert response.status_code == 200, response.text
            warned = name in FOREIGN.ignored
            assert response.headers.get("warning") == (f'299 manta "ignored: {name}"' if warned else None)
        for name, reason in FOREIGN.refused.items():
            response = await api.post("messages", **BODY, **{name: {"a": "b"}})
            assert response.status_code == 400
            assert f"{name} is not supported by this server: {reason}" in response.json()["error"]["message"]


def read(**fields: Any) -> MessagesBody:
    return parse(MessagesBody, json.dumps({**BODY, **fields}).encode())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "document blocks are not"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "tool_use blocks are not read there"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result"}]}]}, "tool_result blocks are not"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "document"}]}]}]}, "in a tool's result"),
        ({"tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}]}, "tools[1] must be a tool with an"),
        ({"tools": [TOOL, TOOL]}, "different from the names of all other tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "any", "name": "f"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice must be one of the tools (f)"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"metadata": {"user_id": "a" * 1025}}, "metadata.user_id"),
        ({"messages": [*BODY["messages"], {"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]}, "a tool_result per tool_use"),
    ],
)  # fmt: skip
def test_bad_body_is_refused_by_the_name_that_the_field_has_here(fields, message):
    with pytest.raises(RequestError) as caught:
        read(**fields).for_chat(512, ChatBody)
    assert message in str(caught.value)


def test_turns_of_one_role_become_one_and_blocks_that_no_model_reads_are_left_out():
    system = [{"type": "text", "text": "x-anthropic-billing-header: cc=1"}, {"type": "text", "text": "Be brief."}]
    turns = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]},
    ]
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    chat = read(system=system, messages=turns).for_chat(512, ChatBody)
    assert [message.for_template() for message in chat.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "tool_calls": [call]},
        {"role": "tool", "content": "", "tool_call_id": "t1"},
    ]


def test_system_turn_stays_one_for_the_chat_template():
    turns = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}, {"role": "system", "content": "c"}]
    assert [(m.role, m.for_template()["content"]) for m in read(messages=turns).for_chat(512, ChatBody).messages] == [
        ("system", "a"),
        ("user", "b"),
        ("system", "c"),
    ]
    assert [m.role for m in read(system="s", messages=turns).for_chat(512, ChatBody).messages] == [
        "system",
        "user",
        "system",
    ]


def test_user_id_is_the_client_whose_fair_share_the_request_counts_to():
    assert read(metadata={"user_id": "u1", "account": 5}).for_chat(512, ChatBody).user == "u1"
    assert read().for_chat(512, ChatBody).user is None


def test_counting_takes_no_sampling_fields():
    assert not {"max_tokens", "stream", "temperature"} & CountTokensBody.model_fields.keys()
