"""Images over HTTP to a real engine, all in this process: the answers are those of `LLM.chat`."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from engine import LLM, SamplingParams
from tests.deployments.parts.images.image_server import IMAGE, image_server
from tests.deployments.parts.images.test_images import OTHER, data_url, image_part, text_part, user
from tests.deployments.real_api import real_api
from tests.vision_models import make_vision_chat_model

MAX_TOKENS = 12
GREEDY = {"temperature": 0, "max_tokens": MAX_TOKENS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_vision_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def offline(folder):
    """The answers of `LLM.chat`, and the tokens of their prompts."""

    def part(given: bytes | str) -> dict[str, Any]:
        if isinstance(given, str):
            return text_part(given)
        return {"type": "image", "image": Image.open(io.BytesIO(given))}

    conversations = {
        "one": [IMAGE, "What is this?"],
        "two": ["First", IMAGE, "then", OTHER, "what?"],
        "swapped": ["First", OTHER, "then", IMAGE, "what?"],
        "text": ["What is this?"],
    }
    with LLM(str(folder), block_size=4, num_gpu_blocks_override=256, num_threads=1) as llm:
        found = llm.chat(
            [user(*map(part, parts)) for parts in conversations.values()],
            SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
            use_tqdm=False,
        )
    answers = [(output.outputs[0].text, len(output.prompt_token_ids)) for output in found]
    assert len({text for text, _ in answers}) == len(answers)
    return dict(zip(conversations, answers, strict=True))


async def chat(client: httpx.AsyncClient, *parts: dict[str, Any], **fields: Any) -> tuple[str, int]:
    answer = await client.post("/v1/chat/completions", json={"messages": user(*parts), **GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    (text,) = {choice["message"]["content"] for choice in body["choices"]}
    return text, body["usage"]["prompt_tokens"]


async def events(client: httpx.AsyncClient, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with client.stream("POST", route, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        return [json.loads(line[6:]) async for line in response.aiter_lines() if line.startswith("data: {")]


async def test_chats_about_images_are_answered_as_offline_beside_bad_images_and_text(folder, offline):
    async with real_api(folder) as api, image_server() as server:
        first, second, question = data_url(IMAGE), data_url(OTHER), text_part("What is this?")
        bad = {"messages": user(image_part(data_url(b"no image"))), **GREEDY}
        *answers, refused = await asyncio.gather(
            chat(api.client, image_part(first), question),
            chat(api.client, image_part(f"{server.url}/image.png"), question),
            chat(api.client, image_part(first), question, n=3),
            chat(api.client, text_part("First"), image_part(first), text_part("then"), image_part(second),
                 text_part("what?")),
            chat(api.client, text_part("First"), image_part(second), text_part("then"), image_part(first),
                 text_part("what?")),
            chat(api.client, question),
            api.client.post("/v1/chat/completions", json=bad),
        )  # fmt: skip
        assert answers == [offline[name] for name in ("one", "one", "one", "two", "swapped", "text")]
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "invalid_image"
        scrape = await api.scrape_when(lambda s: s.sum("manta_engine_requests_ended_total") == 8)
        assert scrape.sum("manta_images_encoded_total") == 2


async def test_streams_and_the_other_apis_answer_about_images_as_offline(folder, offline):
    text, prompt_tokens = offline["one"]
    async with real_api(folder) as api:
        messages = user(image_part(data_url(IMAGE)), text_part("What is this?"))
        tokens = (await api.client.post("/tokenize", json={"messages": messages})).json()
        assert tokens["count"] == len(tokens["tokens"]) == prompt_tokens
        chunks = await events(api.client, "/v1/chat/completions", {"messages": messages, **GREEDY})
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == text

        content = [
            {"type": "input_image", "image_url": data_url(IMAGE), "detail": "auto"},
            {"type": "input_text", "text": "What is this?"},
        ]
        body = {"input": user(*content), "temperature": 0, "max_output_tokens": MAX_TOKENS}
        answer = (await api.client.post("/v1/responses", json=body)).json()
        assert answer["output"][0]["content"][0]["text"] == text, answer
        assert answer["usage"]["input_tokens"] == prompt_tokens
        streamed = await events(api.client, "/v1/responses", body)
        assert "".join(e["delta"] for e in streamed if e["type"] == "response.output_text.delta") == text

        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(IMAGE).decode()}
        body = {"messages": user({"type": "image", "source": source}, text_part("What is this?")), **GREEDY}
        answer = (await api.client.post("/v1/messages", json=body)).json()
        assert answer["content"][0]["text"] == text, answer
        usage = answer["usage"]
        assert usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0) == prompt_tokens
        streamed = await events(api.client, "/v1/messages", body)
        assert "".join(e["delta"]["text"] for e in streamed if e["type"] == "content_block_delta") == text
