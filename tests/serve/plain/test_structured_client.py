"""Answers of a given form for the official client, from a real `serve run` whose model knows nothing."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal

import openai
import pytest
from pydantic import BaseModel, Field

pytestmark = pytest.mark.serve

HELLO = [{"role": "user", "content": "hello"}]


class Water(BaseModel):
    word: Literal["ocean", "lake", "river"]
    salty: bool
    depths_m: Annotated[list[Annotated[int, Field(ge=0, le=9999)]], Field(max_length=3)]


def test_the_clients_own_models_are_filled_in(client):
    def ask(seed: int) -> Water | None:
        answer = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Water, seed=seed)
        return answer.choices[0].message.parsed

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert all(isinstance(answer, Water) for answer in answers)


def test_a_streamed_answer_has_the_form_too(client):
    ask = {"model": "tiny", "messages": HELLO, "stream": True, "seed": 1}
    form = {"structured_outputs": {"regex": "(?:abc|de){4,9}"}}
    chunks = list(client.chat.completions.create(**ask, extra_body=form))
    assert re.fullmatch("(?:abc|de){4,9}", "".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_text_completions_take_forms_too(client):
    answer = client.completions.create(
        model="tiny", prompt="hello", n=4, max_tokens=50, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert {choice.text for choice in answer.choices} <= {"yes", "no"}
    answer = client.completions.create(
        model="tiny", prompt="hello", max_tokens=400, extra_body={"response_format": {"type": "json_object"}, "seed": 2}
    )
    choice = answer.choices[0]
    assert choice.text.startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.text), dict)


@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_cannot_be_enforced_is_a_bad_request(client, stream):
    schema = {"type": "array", "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "set", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, response_format=form, stream=stream)
    assert caught.value.param == "response_format.json_schema.schema"
