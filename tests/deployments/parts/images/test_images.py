"""Requests with images over HTTP, to a fake engine and a real image server."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import sys
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from deployments.options.images import ImageConfig
from deployments.parts.images.image_loader import ImageLoader
from deployments.parts.images.requested_image import RequestedImage
from engine.multimodal.processor import ProcessedImage
from engine.wire.parts.images import images_in
from tests.deployments.fake_api import FakeApi, fake_api, until
from tests.deployments.parts.images.image_server import IMAGE, ImageServer, image_server
from tests.engine.multimodal.images import file_of, picture, processor, tokenizer

OTHER = file_of(picture(24, 60, seed=1), "JPEG")
LIMITS = {"max_per_request": 3, "max_bytes": 50_000, "max_pixels": 10_000, "fetch_timeout_s": 60.0}


def data_url(file: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(file).decode()


def image_part(url: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@asynccontextmanager
async def api_with_images(folder: Path, **options: Any) -> AsyncGenerator[tuple[FakeApi, ImageServer]]:
    """options: of ImageConfig."""
    config = ImageConfig(**{**LIMITS, "allowed_private_networks": ("127.0.0.1",), **options})
    images = ImageLoader(config, processor(folder, "qwen3_vl"))
    async with image_server() as server, fake_api(text_model=tokenizer(), images=images, vocab_size=20) as api:
        yield api, server


def seen(api: FakeApi) -> tuple[str, list[bytes]]:
    """The prompt of the newest request, each image as one placeholder, and the hashes of its images."""
    request, text = api.engine.added[-1], tokenizer()
    words = [text.token(token_id) for token_id in request.prompt]
    for feature in reversed(images_in(request)):
        start, length = feature.mm_position.offset, feature.mm_position.length
        assert words[start : start + length] == ["<|image_pad|>"] * feature.num_embeds
        words[start : start + length] = ["IMAGE"]
    return " ".join(word or "?" for word in words), [feature.mm_hash for feature in images_in(request)]


async def test_images_reach_the_engine_in_their_order_by_each_api(tmp_path):
    first, second = data_url(IMAGE), data_url(OTHER)
    async with api_with_images(tmp_path) as (api, server):
        answers = {}
        content = [text_part("look"), image_part(first), text_part("at this"), image_part(second)]
        answer = await api.post("chat/completions", messages=user(*content), max_tokens=2)
        assert answer.status_code == 200, answer.text
        answers["chat"] = seen(api)
        content = [image_part(f"{server.url}/image.png"), text_part("this")]
        answer = await api.post("chat/completions", messages=user(*content), n=2, max_tokens=2)
        assert answer.status_code == 200, answer.text
        assert seen(api) == ("<unk> IMAGE this", answers["chat"][1][:1])  # the same picture from elsewhere

        content = [
            {"type": "input_text", "text": "look"},
            {"type": "input_image", "image_url": first, "detail": "auto"},
            {"type": "input_text", "text": "at this"},
            {"type": "input_image", "image_url": second},
        ]
        answer = await api.post("responses", input=user(*content), max_output_tokens=2)
        assert answer.status_code == 200, answer.text
        answers["responses"] = seen(api)

        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(IMAGE).decode()}
        content = [
            text_part("look"),
            {"type": "image", "source": source},
            text_part("at this"),
            {"type": "image", "source": {"type": "url", "url": second}},
        ]
        answer = await api.post("messages", messages=user(*content), max_tokens=2)
        assert answer.status_code == 200, answer.text
        answers["anthropic"] = seen(api)
        prompt, hashes = answers["chat"]
        assert prompt == "<unk> look IMAGE at this IMAGE" and len(set(hashes)) == 2
        assert set(map(str, answers.values())) == {str(answers["chat"])}


async def test_what_tools_return_may_be_images(tmp_path):
    async with api_with_images(tmp_path) as (api, _):
        calls = [{"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
        messages = [
            *user(text_part("look")),
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "a", "content": [image_part(data_url(IMAGE))]},
        ]
        assert (await api.post("chat/completions", messages=messages, max_tokens=2)).status_code == 200
        chat = seen(api)
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(IMAGE).decode()}
        result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": source}]}
        messages = [
            *user(text_part("look")),
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
            *user(result),
        ]
        assert (await api.post("messages", messages=messages, max_tokens=2)).status_code == 200
        assert seen(api)[1] == chat[1]
        items = [
            {"role": "user", "content": "look"},
            {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a",
             "output": [{"type": "input_image", "image_url": data_url(IMAGE)}]},
        ]  # fmt: skip
        assert (await api.post("responses", input=items, max_output_tokens=2)).status_code == 200
        assert seen(api)[1] == chat[1]


@pytest.mark.parametrize(("max_per_request", "modalities"), [(1, ["text", "image"]), (0, ["text"])])
async def test_the_list_of_models_says_whether_one_is_served_with_images(tmp_path, max_per_request, modalities):
    async with api_with_images(tmp_path, max_per_request=max_per_request) as (api, _):
        (card,) = (await api.client.get("/v1/models")).json()["data"]
        assert card["input_modalities"] == modalities


async def test_an_image_of_low_detail_has_fewer_tokens_and_tokenize_counts_as_a_chat_does(tmp_path):
    large = data_url(file_of(picture(2000, 12), "PNG"))
    async with api_with_images(tmp_path, max_pixels=10**6, max_bytes=10**6) as (api, _):
        counts = []
        for detail in ("high", "low"):
            messages = user(image_part(large, detail=detail), text_part("look"))
            answer = await api.post("chat/completions", messages=messages, max_tokens=2)
            counts.append(answer.json()["usage"]["prompt_tokens"])
            tokens = await api.client.post("/tokenize", json={"messages": messages})
            assert tokens.json()["count"] == counts[-1] and tokens.json()["tokens"] == api.engine.added[-1].prompt
        assert counts[1] < counts[0]


# URL of an image (or the whole part), and what the error says
BAD: list[tuple[Any, str]] = [
    ("SERVER/nothing", "must be a URL that is answered with 200, not 404"),
    ("SERVER/broken", "200, not 500"),
    ("SERVER/page", "must be an image (JPEG, PNG"),
    ("SERVER/empty", "must be an image"),
    ("SERVER/large", "at most 50000 bytes"),
    ("SERVER/endless", "at most 50000 bytes"),
    ("SERVER/circle", "at most 3 redirects"),
    ("SERVER/redirect?to=http://127.0.0.2:1/", "must be a URL of a public address"),
    ("SERVER/redirect?to=http://169.254.169.254/latest", "must be a URL of a public address"),
    ("SERVER/redirect?to=file:///etc/passwd", "must be a data:, http: or https: URL"),
    ("http://10.0.0.1/a.png", "must be a URL of a public address"),
    ("http://[::1]/a.png", "must be a URL of a public address"),
    ("http://localhost:1/a.png", "must be a URL"),
    ("http://me:secret@127.0.0.1/a.png", "without a user and a password"),
    ("file:///etc/passwd", "must be a data:, http: or https: URL"),
    ("ftp://127.0.0.1/a.png", "must be a data:, http: or https: URL"),
    ("image.png", "must be a data:, http: or https: URL"),
    ("", "must be a data:, http: or https: URL"),
    ("data:image/png;base64,????", "must be valid base64"),
    ("data:image/png,abc", "must be a data: URL in base64"),
    ("data:image/png;base64,", "must be an image"),
    (data_url(b"no image"), "must be an image"),
    (data_url(IMAGE[:200]), "that can be decoded"),
    (data_url(file_of(picture(101, 100))), "at most 10000 pixels (ingress.images.max_pixels)"),
    (data_url(file_of(picture(201, 1))), "by a factor of 200"),
    (data_url(b"a" * 60_000), "at most 50000 bytes"),
    ({"type": "image_url"}, "an image with a URL in image_url (Field required)"),
    ({"type": "image_url", "image_url": 5}, "an image with a URL in image_url"),
    ({"type": "image_url", "image_url": {"url": ["a"]}}, "an image with a URL in image_url"),
    ({"type": "image_url", "image_url": {"url": "a", "detail": "tiny"}}, "an image with a URL in image_url"),
    ({"type": "input_image", "file_id": "file-1"}, "an image with a URL in image_url"),
    ({"type": "video_url", "video_url": {"url": "data:"}}, "part [1] is of the unsupported type video_url"),
    ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "of the unsupported type input_audio"),
    (text_part("<|image_pad|>"), "texts must not contain it"),
]


async def test_each_bad_image_is_refused_by_name_and_disturbs_nothing_else(tmp_path):
    async with api_with_images(tmp_path, max_in_flight=2) as (api, server):
        bad = [json.loads(json.dumps(one).replace("SERVER", server.url)) for one, _ in BAD]
        parts = [one if isinstance(one, dict) else image_part(one) for one in bad]
        content = [image_part(data_url(IMAGE)), text_part("look")]
        answers = [
            api.post("chat/completions", messages=user(text_part("look"), part, *content[:1]), max_tokens=2)
            for part in parts
        ]
        good = [api.post("chat/completions", messages=user(*content), max_tokens=2) for _ in range(3)]
        refused, answered = await asyncio.gather(asyncio.gather(*answers), asyncio.gather(*good))
        assert [answer.status_code for answer in answered] == [200] * 3
        for (one, message), answer in zip(BAD, refused, strict=True):
            assert answer.status_code == 400, (one, answer.text)
            error = answer.json()["error"]
            assert message in error["message"] and error["param"] == "messages", (one, error)
            assert error["type"] == "invalid_request_error" and "secret" not in error["message"]
            named = "messages[0].content" if isinstance(one, dict) else "messages[0].content[1].image_url"
            assert named in error["message"] or "texts must not" in message, (one, error)
        assert len(api.engine.added) == 3


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": user(*[image_part(data_url(IMAGE))] * 4)}, "messages", "at most 3 images (ingress.images"),
        ({"truncate_prompt_tokens": 10}, "truncate_prompt_tokens", "must be left out with images"),
    ],
)
async def test_a_request_that_cannot_have_its_images_is_refused(tmp_path, fields, param, message):
    async with api_with_images(tmp_path) as (api, _):
        body = {"messages": user(image_part(data_url(IMAGE))), **fields}
        error = (await api.post("chat/completions", **body)).json()["error"]
        assert error["param"] == param and message in error["message"]


async def test_images_that_exceed_the_context_are_refused_as_a_long_prompt_is(tmp_path):
    large = data_url(file_of(picture(100, 100)))  # 64 × 64 after resizing
    async with api_with_images(tmp_path, max_per_request=16) as (api, _):
        answer = await api.post("chat/completions", messages=user(*[image_part(large)] * 9))
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded" and "576 tokens > " in error["message"]
        assert api.engine.added == []


@pytest.mark.parametrize("route", ["chat/completions", "responses", "messages"])
async def test_errors_name_the_image_as_the_api_does_and_so_does_a_model_that_reads_text_only(tmp_path, route):
    text, image, fields = {
        "chat/completions": (text_part("a"), image_part("data:"), {"messages": 1}),
        "responses": ({"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:"}, {"input": 1}),
        "messages": (text_part("a"), {"type": "image", "source": {"type": "url", "url": "data:"}}, {"messages": 1}),
    }[route]
    [name] = fields
    path = {
        "chat/completions": "messages[1].content[1].image_url",
        "responses": "input[1].content[1].input_image",
        "messages": "messages[1].content[1].source",
    }[route]
    turns = [*user(text), *user(text, image)]
    body = {name: turns, **({"max_tokens": 5, "system": "a"} if route == "messages" else {})}
    async with api_with_images(tmp_path) as (api, _):
        assert f"{path} must be a data: URL in base64" in (await api.post(route, **body)).text
    async with fake_api() as api:
        answer = await api.post(route, **body)
        assert answer.status_code == 400
        assert f"{path} must be text, because model 'fake' reads no images" in answer.json()["error"]["message"]


async def test_an_image_that_does_not_come_is_refused_once_its_time_is_over(tmp_path):
    async with api_with_images(tmp_path, fetch_timeout_s=0.05) as (api, server):
        answer = await api.post("chat/completions", messages=user(image_part(f"{server.url}/silent")))
        assert answer.status_code == 400 and "loaded within 0.05 s" in answer.json()["error"]["message"]


async def test_a_request_waits_for_its_images_no_longer_than_its_own_deadline(tmp_path):
    async with api_with_images(tmp_path) as (api, server):
        body = {"messages": user(image_part(f"{server.url}/silent"))}
        headers = {"X-Request-Timeout-Ms": "50"}
        answer = await api.client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 408 and answer.json()["error"]["type"] == "timeout_error"


def test_no_more_images_are_processed_at_a_time_than_allowed(tmp_path, monkeypatch):
    running, most = 0, 0
    process = ImageLoader._process

    async def scenario() -> None:
        async with api_with_images(tmp_path, max_per_request=16, max_in_flight=4, max_processing=1) as (api, _):
            answer = await api.post(
                "chat/completions", messages=user(*[image_part(data_url(IMAGE))] * 16), max_tokens=2
            )
            assert answer.status_code == 200, answer.text

    def counted(self, *args):
        nonlocal running, most
        running += 1
        most = max(most, running)
        found = process(self, *args)
        running -= 1
        return found

    monkeypatch.setattr(ImageLoader, "_process", counted)
    asyncio.run(scenario())
    assert most == 1


async def test_requests_that_are_given_up_while_their_images_wait_leave_neither_room_nor_their_files(
    tmp_path, monkeypatch
):
    loader = ImageLoader(ImageConfig(max_processing=1), processor(tmp_path, "qwen3_vl"))
    begun, go_on = threading.Semaphore(0), threading.Event()
    process, file = ImageLoader._process, bytes(bytearray(IMAGE))
    references = sys.getrefcount(file)

    async def load(*_: object) -> bytes:
        return file

    def slow(self, *args: Any) -> ProcessedImage:
        begun.release()
        assert go_on.wait(60)
        return process(self, *args)

    monkeypatch.setattr(ImageLoader, "_process", slow)
    monkeypatch.setattr(loader._media, "load", load)
    asked = [asyncio.create_task(loader.load([RequestedImage("x", data_url(IMAGE), False)])) for _ in range(3)]
    assert await asyncio.to_thread(begun.acquire, timeout=30)
    for given_up in asked[:2]:
        given_up.cancel()
    await asyncio.wait(asked[:2])
    assert not begun.acquire(blocking=False), "the first is still at work"
    assert sys.getrefcount(file) == references + 1, "those that are given up keep their file"
    go_on.set()
    assert len(await asked[2]) == 1
    assert begun.acquire(blocking=False) and not begun.acquire(blocking=False), "the second never began"


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "once"}], ids=["answer", "job"])
def test_images_leave_memory_with_the_answer_without_a_garbage_collection(tmp_path, headers):
    async def scenario() -> None:
        async with api_with_images(tmp_path) as (api, _):
            body = {"messages": user(image_part(data_url(IMAGE))), "max_tokens": 2}
            answer = await api.client.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200
            await until(lambda: api.images.memory.used == 0)

    gc.disable()
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()


def test_processed_images_fit_the_memory_until_the_answers_about_them_have_ended(tmp_path, monkeypatch):
    file = data_url(file_of(picture(64, 64)))
    size = 64 * 64 * 3 * 2  # bytes, as Qwen has each pixel twice
    seen: list[int] = []
    process = ImageLoader._process

    def measured(self, *args: Any) -> ProcessedImage:
        found = process(self, *args)
        assert len(found.data["pixel_values"].data) == size == self.processor.max_bytes
        seen.append(self.memory.used)
        return found

    monkeypatch.setattr(ImageLoader, "_process", measured)

    async def scenario() -> None:
        limits = {"max_processed_bytes": 4 * size, "max_bytes": 10**6, "max_processing": 4}
        async with api_with_images(tmp_path, **limits) as (api, _):
            one, bad, large = ([image_part(file)], [image_part(file), image_part("data:")], [image_part(file)] * 3)
            asked = [*[one] * 7, bad, large, [image_part(file)] * 3]
            answers = [api.post("chat/completions", messages=user(*parts), max_tokens=2, n=2) for parts in asked]
            statuses = [answer.status_code for answer in await asyncio.gather(*answers)]
            assert statuses == [*[200] * 7, 400, 200, 200]
            memory = api.images.memory
            await until(lambda: memory.used == 0)

    asyncio.run(scenario())
    assert 3 * size <= max(seen) <= 4 * size and len(seen) >= 13
