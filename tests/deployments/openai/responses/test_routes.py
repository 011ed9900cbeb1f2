"""The Responses API by OpenAI's own client, and as raw events that its types accept."""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import Any

import openai
import pydantic
import pytest

from deployments.http.middleware import AuthConfig
from engine.errors import InvalidParameter, Overloaded
from engine.wire.token_delta import ErrorInfo
from tests.deployments.fake_api import until
from tests.deployments.openai.responses.serving import (
    ARGUMENTS,
    CALL,
    WEATHER,
    ask,
    ask_streamed,
    builder_of,
    client_of,
    prompt,
    serving,
)

THOUGHT = "<think>\nhm\n</think>\n\nGood day."


class Weather(pydantic.BaseModel):
    """What the weather is like."""

    city: str


def shapes(output: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Type and text of each item."""
    found = []
    for item in output:
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        found.append((item["type"], text))
    return found


OUTPUTS = [
    ("Good day.", [("message", "Good day.")]),
    ("", [("message", "")]),
    (CALL, [("function_call", ARGUMENTS)]),
    (f"Let me see.\n{CALL}\n{CALL}", [("message", "Let me see."), *[("function_call", ARGUMENTS)] * 2]),
    (f"<think>\nhm\n</think>\n\n{CALL}", [("reasoning", "hm"), ("function_call", ARGUMENTS)]),
    (THOUGHT, [("reasoning", "hm"), ("message", "Good day.")]),
]


@pytest.mark.parametrize(("text", "expected"), OUTPUTS)
async def test_a_stream_adds_up_to_the_response_that_comes_without_it(text, expected):
    async with serving(text) as api:
        whole = await ask(api, tools=[WEATHER])
        assert (whole["status"], shapes(whole["output"])) == ("completed", expected)
        events = await ask_streamed(api, tools=[WEATHER])
        assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
        assert events[-1]["type"] == "response.completed"
        assert shapes(events[-1]["response"]["output"]) == expected
        assert events[-1]["response"]["usage"] == whole["usage"]
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"]
        for i, (_, item_text) in enumerate(expected):
            deltas = [e["delta"] for e in events if e.get("output_index") == i and e["type"].endswith(".delta")]
            assert "".join(deltas) == item_text


async def test_every_item_of_a_stream_is_added_grown_and_done_in_that_order():
    async with serving(f"<think>\nhm\n</think>\n\nWell.\n{CALL}") as api:
        events = await ask_streamed(api, tools=[WEATHER])
        names = [e["type"].removeprefix("response.") for e in events if not e["type"].endswith(".delta")]
        part = ["content_part.added", "{}.done", "content_part.done"]
        assert names == [
            *["created", "in_progress"],
            *["output_item.added", *[name.format("reasoning_text") for name in part], "output_item.done"],
            *["output_item.added", *[name.format("output_text") for name in part], "output_item.done"],
            *["output_item.added", "function_call_arguments.done", "output_item.done"],
            "completed",
        ]
        (done,) = [e for e in events if e["type"] == "response.function_call_arguments.done"]
        assert done["name"] == WEATHER["name"]


@pytest.mark.parametrize("stream", [True, False])
async def test_the_official_client_makes_the_round_trip_of_a_tool_call(stream):
    async with serving(f"<think>\nhm\n</think>\n\n{CALL}", "Sunny.", THOUGHT) as api:
        client = client_of(api)
        question: list[Any] = [{"role": "user", "content": "How is the weather?"}]
        if stream:
            async with client.responses.stream(model="fake", input=question, tools=[WEATHER]) as events:
                response = await events.get_final_response()
        else:
            response = await client.responses.create(model="fake", input=question, tools=[WEATHER])
        call = response.output[-1]
        assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Zürich"}
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        answer = await client.responses.create(
            model="fake", input=[*question, *response.output, result], tools=[WEATHER]
        )
        assert answer.output_text == "Sunny."
        sent_back = prompt(api)
        assert "<think>\nhm\n</think>" in sent_back and CALL in sent_back
        assert "<|im_start|>tool\nsunny" in sent_back

        stored = await client.responses.create(
            model="fake", previous_response_id=response.id, input=[result], tools=[WEATHER]
        )
        assert prompt(api) == sent_back
        assert stored.previous_response_id == response.id and stored.output_text == "Good day."


async def test_the_official_client_parses_a_schema():
    async with serving('{"city": "Bern"}') as api:
        response = await client_of(api).responses.parse(model="fake", input="Where?", text_format=Weather)
        assert response.output_parsed == Weather(city="Bern")
        outputs = api.engine.added[0].params.structured_outputs
        assert outputs is not None and "city" in outputs.text


async def test_the_official_client_retrieves_lists_and_deletes():
    async with serving("Good day.") as api:
        client = client_of(api)
        items: list[Any] = [{"role": "user", "content": f"word {i}"} for i in range(5)]
        made = await client.responses.create(model="fake", input=items, metadata={"a": "b"}, instructions="Be.")
        found = await client.responses.retrieve(made.id)
        assert found.to_dict() == made.to_dict() and found.metadata == {"a": "b"}
        pages = client.responses.input_items.list(made.id, limit=2, order="asc")
        assert [item.content async for item in pages] == [f"word {i}" for i in range(5)]
        newest = await client.responses.input_items.list(made.id, limit=1)
        assert newest.data[0].content == "word 4" and newest.has_more
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.cancel(made.id)
        await client.responses.delete(made.id)
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="each ingress keeps only its own responses"):
                await call(made.id)


async def test_what_is_not_to_be_stored_is_not():
    async with serving("a") as api:
        made = await ask(api, store=False)
        assert made["store"] is False
        assert (await api.client.get(f"/v1/responses/{made['id']}")).status_code == 404


async def test_a_reference_stands_for_the_item_of_a_stored_response():
    async with serving("Good day.") as api:
        made = await ask(api)
        (item,) = made["output"]
        turn = {"role": "user", "content": "and?"}
        await ask(api, input=[{"role": "user", "content": "hello"}, {"type": "item_reference", "id": item["id"]}, turn])
        referenced = prompt(api)
        assert "<|im_start|>assistant\nGood day.<|im_end|>" in referenced
        await ask(api, input=[turn], previous_response_id=made["id"])
        assert prompt(api) == referenced
        for unknown in ("msg_1", f"msg_{'0' * 32}_0", f"{item['id']}1"):
            answer = await api.post("responses", input=[{"type": "item_reference", "id": unknown}])
            assert answer.status_code in (400, 404), unknown


async def test_each_api_key_finds_its_own_responses_only(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(
        "alice:2bd806c97f0e00af1a1fc3328fa763a9269723c8db8fac4f93af71db186d6e90\n"
        "bob:81b637d8fcd2c6da6359e6963113a1170de795e4b725b84d1e0b4cfd9ec58ce9\n"
    )  # of `alice` and `bob`
    async with serving("a", auth=AuthConfig(api_keys_file=str(keys))) as api:

        def key(name: str) -> dict[str, str]:
            return {"Authorization": f"Bearer {name}"}

        made = await api.client.post("/v1/responses", json={"input": "a"}, headers=key("alice"))
        path = f"/v1/responses/{made.json()['id']}"
        assert (await api.client.get(path, headers=key("alice"))).status_code == 200
        for method, suffix in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
            answer = await api.client.request(method, path + suffix, headers=key("bob"))
            assert answer.status_code == 404, (method, suffix)
        body = {"input": "a", "previous_response_id": made.json()["id"]}
        assert (await api.client.post("/v1/responses", json=body, headers=key("bob"))).status_code == 404


async def test_max_output_tokens_makes_a_response_incomplete():
    async with serving("Good day.") as api:
        whole = await ask(api, max_output_tokens=4)
        assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert whole["output"][0]["status"] == "incomplete"
        events = await ask_streamed(api, max_output_tokens=4)
        assert events[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_refusal_before_the_first_output_has_its_own_status(stream):
    async with serving("a") as api:
        api.engine.refusal = ErrorInfo.of(Overloaded("the queue is full"))
        answer = await api.post("responses", input="a", stream=stream)
        assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")


async def test_a_failure_after_the_first_output_ends_the_stream_with_an_error_and_as_failed():
    async with serving("a" * 200, max_replays=0) as api:
        names = []
        builder = await builder_of(api, input="a")
        async for event in builder.events():
            names.append(event.__struct_config__.tag)
            if names[-1] == "response.output_text.delta":
                api.engine.paused.set()
                api.replica.fail("rank 0 died")
        assert names[-3:] == ["response.output_item.done", "error", "response.failed"]
        response = builder.response
        assert (response.status, response.error.code) == ("failed", "server_error")
        assert response.output[0].status == "incomplete"


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_of_the_engine_names_the_field_as_it_is_called_here(stream):
    async with serving("a") as api:
        chat = InvalidParameter("response_format.json_schema.schema", {}, "a JSON schema")
        api.engine.refusal = ErrorInfo.of(chat)
        error = (await api.post("responses", input="a", stream=stream)).json()["error"]
        assert error["message"] == "text.format.schema must be a JSON schema, got {}"
        assert error["param"] == "text.format.schema"


async def test_numbers_of_any_size_are_stored_and_shown():
    async with serving("a") as api:
        turn = {"role": "user", "content": "a", "more": 2**70}
        made = await ask(api, input=[turn], tools=[{**WEATHER, "more": -(2**70)}])
        assert (await api.client.get(f"/v1/responses/{made['id']}")).json() == made
        listed = (await api.client.get(f"/v1/responses/{made['id']}/input_items")).json()
        assert listed["data"][0]["more"] == 2**70


async def test_an_id_that_is_no_text_is_replaced():
    async with serving("a") as api:
        made = await ask(api, input=[{"role": "user", "content": "a", "id": ["b"]}])
        reference = {"type": "item_reference", "id": made["output"][0]["id"]}
        await ask(api, input=[reference])
        listed = (await api.client.get(f"/v1/responses/{made['id']}/input_items")).json()
        assert listed["data"][0]["id"].startswith("in_")


async def test_closing_the_stream_aborts_the_request():
    async with serving("a" * 200) as api:
        async with aclosing((await builder_of(api, input="a")).events()) as events:
            await anext(events)
        await until(lambda: len(api.engine.aborted) == 1)
