"""Fields and forms that clients of OpenAI's and vLLM's send beside the usual ones, and what they do."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from deployments.http.body import parse
from deployments.openai.chat_body import ChatBody
from deployments.openai.completion_body import CompletionBody
from engine.text.chat_tokenizer import ChatTokenizer
from engine.wire.parts.speculation import Prediction
from tests.deployments.fake_api import MAX_MODEL_LEN, FakeApi, fake_api, says, tokenizer

HELLO = [{"role": "user", "content": "hello"}]
BOTH: dict[str, dict[str, Any]] = {"chat/completions": {"messages": HELLO}, "completions": {"prompt": "hello"}}


def sent(api: FakeApi) -> str:
    """The last prompt, as text."""
    return tokenizer().decode(api.engine.added[-1].prompt)


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_numbers_may_be_texts_and_whole_ones_may_have_a_point(kind):
    body = {"messages": HELLO} if kind is ChatBody else {"prompt": "a"}
    given = {"max_tokens": 1.0, "n": "2", "top_k": "3.0", "temperature": "0.5", "seed": str(2**62 + 1), "min_p": 1}
    parsed = parse(kind, json.dumps({**body, **given}).encode())
    found = {name: getattr(parsed, name) for name in given}
    assert found == {"max_tokens": 1, "n": 2, "top_k": 3, "temperature": 0.5, "seed": 2**62 + 1, "min_p": 1.0}
    assert type(parsed.max_tokens) is int


async def test_chat_has_the_log_probabilities_of_its_prompt_and_the_ids_of_all_tokens_if_it_asks():
    async with fake_api(says("ok")) as api:
        ask = {"messages": HELLO, "max_tokens": 2}
        answer = (await api.post("chat/completions", **ask, prompt_logprobs=0, return_token_ids=True)).json()
        prompt = api.engine.added[-1].prompt
        assert answer["prompt_token_ids"] == prompt
        assert answer["choices"][0]["token_ids"] == tokenizer().encode("ok")
        first, second, *_ = answer["prompt_logprobs"]
        assert first is None and set(second[str(prompt[1])]) == {"logprob", "rank", "decoded_token"}
        assert len(answer["prompt_logprobs"]) == len(prompt)
        first, *chunks = await api.stream("chat/completions", **ask, return_token_ids=True)
        assert first["prompt_token_ids"] == prompt
        ids = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
        assert ids == tokenizer().encode("ok")
        plain = (await api.post("chat/completions", **ask)).json()
        assert plain["prompt_logprobs"] is plain["prompt_token_ids"] is plain["choices"][0]["token_ids"] is None


@pytest.mark.parametrize(
    "content", ["the answer", [{"type": "text", "text": "the "}, {"type": "text", "text": "answer"}]]
)
async def test_prediction_of_the_answer_goes_to_the_engine_and_its_tokens_are_counted(content):
    async with fake_api(says("ok"), drafts=True) as api:
        ask = {"messages": HELLO, "max_tokens": 2, "prediction": {"type": "content", "content": content}}
        answer = await api.post("chat/completions", **ask)
        assert "warning" not in answer.headers
        assert tokenizer().decode(api.engine.added[-1].record(Prediction).tokens) == "the answer"
        usage = answer.json()["usage"]
        expected = {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 4}
        assert usage["completion_tokens_details"] == expected
        *_, last = await api.stream("chat/completions", **ask, stream_options={"include_usage": True})
        assert last["usage"] == usage
        for _ in range(2):  # as it comes, and from where it is kept
            kept = await api.client.post("/v1/chat/completions", json=ask, headers={"Idempotency-Key": "a"})
            assert kept.json()["usage"] == usage
        answer = await api.post("chat/completions", messages=HELLO, max_tokens=2)
        assert answer.json()["usage"]["completion_tokens_details"] is None


async def test_without_drafts_a_prediction_is_ignored_with_a_warning():
    async with fake_api(says("ok")) as api:
        body = {"messages": HELLO, "prediction": {"type": "content", "content": "ok"}}
        answer = await api.post("chat/completions", **body)
        assert answer.headers["warning"] == '299 manta "ignored: prediction"'


async def test_log_probabilities_name_tokens_by_their_ids_if_the_request_says_so():
    async with fake_api(says("xy")) as api:
        x, y = (f"token_id:{token}" for token in tokenizer().encode("xy"))
        ask = {"max_tokens": 2, "return_tokens_as_token_ids": True}
        chat = await api.post("chat/completions", messages=HELLO, logprobs=True, top_logprobs=1, **ask)
        assert [entry["token"] for entry in chat.json()["choices"][0]["logprobs"]["content"]] == [x, y]
        choice = (await api.post("completions", prompt="xy", echo=True, logprobs=1, **ask)).json()["choices"][0]
        assert choice["logprobs"]["tokens"] == [x, y, x, y]
        assert x in choice["logprobs"]["top_logprobs"][2]


@pytest.mark.parametrize("route", BOTH)
async def test_prompt_that_is_too_long_is_cut_if_the_request_says_so(route):
    async with fake_api(says("ok")) as api:
        await api.post(route, **BOTH[route], max_tokens=1)
        whole = api.engine.added[-1].prompt
        for side, kept in (("left", whole[-3:]), ("right", whole[:3])):
            cut = {"truncate_prompt_tokens": 3, "truncation_side": side}
            answer = await api.post(route, **BOTH[route], max_tokens=1, **cut)
            assert api.engine.added[-1].prompt == kept
            assert answer.json()["usage"]["prompt_tokens"] == 3
        long = "a b " * MAX_MODEL_LEN
        body = {"messages": [{"role": "user", "content": long}]} if "chat" in route else {"prompt": long}
        assert (await api.post(route, **body, max_tokens=9)).status_code == 400
        assert (await api.post(route, **body, max_tokens=9, truncate_prompt_tokens=-1)).status_code == 200
        assert len(api.engine.added[-1].prompt) == MAX_MODEL_LEN - 9


@pytest.mark.parametrize("route", BOTH)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_of_any_length_can_be_cut_and_costs_no_more_than_what_is_kept(route, side, monkeypatch):
    words = " ".join(f"word{i}" for i in range(40_000))
    body = {"messages": [{"role": "user", "content": words}]} if "chat" in route else {"prompt": words}
    encode, sizes = ChatTokenizer._encode, list[int]()

    def counted(self: ChatTokenizer, text: str, add_special_tokens: bool) -> Any:
        sizes.append(len(text))
        return encode(self, text, add_special_tokens)

    async def scenario() -> None:
        async with fake_api(says("ok")) as api:
            for kept in (-1, 100):
                cut = {"truncate_prompt_tokens": kept, "truncation_side": side, "max_tokens": 9}
                answer = await api.post(route, **body, **cut)
                assert answer.status_code == 200, answer.text
                prompt, num_kept = api.engine.added[-1].prompt, MAX_MODEL_LEN - 9 if kept == -1 else kept
                assert answer.json()["usage"]["prompt_tokens"] == len(prompt) == num_kept
                text = tokenizer().decode(prompt, skip_special_tokens=False)
                if "chat" not in route:
                    whole = tokenizer().encode(words)
                    assert prompt == (whole[-num_kept:] if side == "left" else whole[:num_kept])
                assert ("word39999" if side == "left" else "word0 word1 ") in text

    monkeypatch.setattr(ChatTokenizer, "_encode", counted)
    asyncio.run(scenario())
    assert sum(size > 100_000 for size in sizes) == (0 if "chat" in route else 2)


async def test_echo_of_a_cut_prompt_is_what_is_left_of_it():
    async with fake_api(says("!")) as api:
        for prompt in ("abcd", tokenizer().encode("abcd")):
            answer = await api.post("completions", prompt=prompt, echo=True, max_tokens=1, truncate_prompt_tokens=2)
            assert answer.json()["choices"][0]["text"] == "cd!"


async def test_echo_of_a_chat_is_the_message_of_the_assistant_that_it_continues():
    ask = {"echo": True, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 3}
    messages = [*HELLO, {"role": "assistant", "content": "Well, "}]
    async with fake_api(says("hi!")) as api:
        answer = await api.post("chat/completions", messages=messages, **ask)
        assert answer.json()["choices"][0]["message"]["content"] == "Well, hi!"
        chunks = await api.stream("chat/completions", messages=messages, **ask)
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Well, hi!"
        answer = await api.post("chat/completions", messages=HELLO, echo=True, max_tokens=3)
        assert answer.json()["choices"][0]["message"]["content"] == "hi!"


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "False False "),
        ({"thinking": {"type": "enabled"}}, "True True "),
        ({"documents": [{"title": "t", "text": "a"}]}, "  a"),
    ],
)
def test_field_that_is_a_variable_of_the_template_is_seen_there_or_ignored_with_a_warning(monkeypatch, given, prompt):
    template = "{{ thinking }} {{ enable_thinking }} {% for d in documents or [] %}{{ d.text }}{% endfor %}"
    template += "{{ messages[0].content }}"

    async def scenario() -> None:
        async with fake_api(says("ok")) as api:
            ask = {"messages": HELLO, "max_tokens": 1, **given}
            (name,) = given
            ignored = await api.post("chat/completions", **ask)
            assert ignored.headers["warning"] == f'299 manta "ignored: {name}"'
            monkeypatch.setattr(tokenizer(), "chat_template", template)
            assert "warning" not in (await api.post("chat/completions", **ask)).headers
            assert sent(api) == prompt + HELLO[0]["content"]

    asyncio.run(scenario())


async def test_special_tokens_are_added_to_a_chat_only_if_it_asks():
    async with fake_api(says("ok")) as api:
        for special in (False, True):
            await api.post("chat/completions", messages=HELLO, max_tokens=1, add_special_tokens=special)
        plain, more = (request.prompt for request in api.engine.added)
        assert more == tokenizer().encode(tokenizer().decode(plain, skip_special_tokens=False))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_text", "text": "no"},
        {"type": "output_text", "text": "no", "annotations": []},
        {"type": "refusal", "refusal": "no"},
        {"type": "text", "text": "no", "cache_control": {"type": "ephemeral"}},
    ],
)
async def test_every_kind_of_text_part_is_text(part):
    async with fake_api(says("ok")) as api:
        for content in ("no", [part]):
            body = {"messages": [{"role": "assistant", "content": content}, *HELLO], "max_tokens": 1}
            assert (await api.post("chat/completions", **body)).status_code == 200
        assert api.engine.added[0].prompt == api.engine.added[1].prompt


def test_function_calls_of_old_clients_are_tool_calls_for_the_template():
    call = {"name": "f", "arguments": '{"a": 1}'}
    asks = {"role": "assistant", "content": None, "function_call": call}
    answers = {"role": "function", "name": "f", "content": "1"}
    old = parse(ChatBody, json.dumps({"messages": [asks, answers]}).encode())
    asked, answered = (message.for_template() for message in old.messages)
    assert asked["tool_calls"] == [{"type": "function", "function": call}]
    assert answered == {"name": "f", "role": "tool", "content": "1"}


async def test_session_may_be_named_in_the_body():
    async with fake_api(says("ok")) as api:
        await api.post("completions", prompt="a", max_tokens=1, session_id="s-1")
        assert api.engine.added[-1].session_id == "s-1"
