"""The words of errors: a sentence that says what a value must be, whoever found that it is something else."""

from __future__ import annotations

import asyncio
import json
import pickle
from typing import Any

import pytest

from deployments.anthropic.request_bodies import MessagesBody
from deployments.http.body import RequestBody, parse, validated
from deployments.openai.chat_body import ChatBody
from deployments.openai.responses.request_body import ResponsesBody, RetrieveQuery
from deployments.openai.structural_tag import structural_tag_grammar
from deployments.options.images import ImageConfig
from deployments.parts.images.image_loader import ImageLoader
from deployments.parts.images.requested_image import RequestedImage
from deployments.pooling.request_bodies import ScoreBody
from engine.errors import InvalidParameter
from engine.multimodal.image import decode
from tests.engine.multimodal.images import file_of, picture

COMPLETE: dict[type, dict[str, Any]] = {
    ChatBody: {"messages": [{"role": "user", "content": "hello"}]},
    MessagesBody: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5},
}


def picture_from(source: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}


def nested(depth: int) -> dict[str, Any]:
    tag: dict[str, Any] = {"type": "any_text"}
    for _ in range(depth):
        tag = {"type": "sequence", "elements": [tag]}
    return {"format": tag}


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (ChatBody, {"user": "u" * 1025}, "user must be a text of at most 1024 characters, got"),
        (
            ChatBody,
            {"logit_bias": {str(i): 0.0 for i in range(10_001)}},
            "must be an object of at most 10000 items, got",
        ),
        (ChatBody, {"stop": ["a"], "messages": []}, "messages must be a list of at least 1 item, got []"),
        (
            MessagesBody,
            picture_from({"type": "x" * 1000}),
            "or an object whose type is one of 'base64', 'url', got",
        ),
        (MessagesBody, picture_from({}), "or an object with a type, got"),
        (MessagesBody, {"tools": [{"name": "?", "input_schema": {}}]}, "name must be a text matching pattern"),
        (RetrieveQuery, {"starting_after": "x"}, "starting_after must be a valid integer, got 'x'"),
        (RetrieveQuery, {"starting_after": 1.5}, "starting_after must be a valid integer, got 1.5"),
        (RetrieveQuery, {"stream": "x"}, "stream must be a valid boolean, got 'x'"),
    ],
)
def test_an_error_is_a_sentence_about_what_the_value_must_be(kind, body, message):
    whole = {**COMPLETE.get(kind, {}), **body}
    with pytest.raises(InvalidParameter) as caught:
        parse(kind, json.dumps(whole).encode()) if issubclass(kind, RequestBody) else validated(kind, whole)
    assert message in str(caught.value) and len(str(caught.value)) < 400


async def no_images(limit: int) -> None:
    images = [RequestedImage(f"messages[{i}]", "data:", False) for i in range(limit + 1)]
    await ImageLoader(ImageConfig(max_per_request=limit), None).load(images)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (
            lambda: asyncio.run(no_images(16)),
            "messages must be a conversation with at most 16 images (ingress.images.max_per_request), got 17",
        ),
        (
            lambda: decode(file_of(picture(101, 100)), "image", 100),
            "image must be an image of at most 100 pixels (ingress.images.max_pixels), got 101 × 100",
        ),
        (
            lambda: parse(ScoreBody, json.dumps({"queries": ["a"] * 3, "documents": ["b"] * 2}).encode()),
            "queries must be a list of as many as there are documents (2), or one, got 3",
        ),
        (
            lambda: parse(ResponsesBody, json.dumps({"input": [{}] * 4097}).encode()),
            "input must be a list of at most 4096 items, got 4097",
        ),
        (
            lambda: structural_tag_grammar(nested(100), "response_format", closed=True),
            "response_format must be a format nested at most 32 deep, got a deeper one",
        ),
    ],
)
def test_an_error_about_how_many_there_are_says_so_without_quotes(refused, message):
    with pytest.raises(InvalidParameter) as caught:
        refused()
    assert str(caught.value) == message
    assert str(pickle.loads(pickle.dumps(caught.value))) == message
