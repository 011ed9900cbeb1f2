"""Every API says where an answer has gone on in an engine of another version."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from deployments.frontend import retry
from engine.errors import EngineUnavailable
from engine.wire.generate_request import GenerateRequest
from engine.wire.token_delta import ErrorInfo, TokenBatch, TokenDelta
from tests.deployments.fake_api import FakeApi, fake_api, tokenizer

WORDS = tokenizer().encode("The quick brown fox jumps")
BEFORE = 3  # tokens of the old version
HELLO = [{"role": "user", "content": "hello"}]
APIS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HELLO},
    "completions": {"prompt": "hello"},
    "responses": {"input": "hello"},
    "messages": {"messages": HELLO, "max_tokens": len(WORDS)},
}


class Versions:
    """An engine of the old version, which ends after a few tokens, and after it one of the new version."""

    def __init__(self, reply_to: str, numerics: dict[bool, str]):
        self._numerics = numerics  # by whether it is the new version
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PUSH)
        self._socket.connect(reply_to)

    async def generate(self, *requests: GenerateRequest, avoid: Sequence[str] = ()) -> None:
        for request in requests:
            given = len(request.prompt) - (request.num_prompt or len(request.prompt))
            if given:
                await self._send(request, token_ids=WORDS[given:], position=given, finish_reason="length")
            else:
                await self._send(request, token_ids=WORDS[:BEFORE])
                await self._send(request, finish_reason="error", error=ErrorInfo.of(EngineUnavailable("it ends")))

    async def _send(self, request: GenerateRequest, **fields: Any) -> None:
        delta, new = TokenDelta(request_id=request.request_id, **fields), "." in request.request_id
        batch = TokenBatch(
            engine_id=f"new={new}",
            commands_to="tcp://127.0.0.1:9",
            step=0,
            deltas=[delta],
            numerics=self._numerics[new],
        )
        await self._socket.send(msgspec.msgpack.encode(batch))

    def close(self) -> None:
        self._socket.close(linger=0)


async def usage_of(api: FakeApi, route: str, numerics: dict[bool, str], *, streamed: bool) -> dict[str, Any]:
    versions = Versions(api.channel.address, numerics)
    options = {"stream_options": {"include_usage": True}} if streamed and route.endswith("completions") else {}
    api.pool.generate = versions.generate  # type: ignore[method-assign]
    try:
        response = await api.post(route, model="fake", stream=streamed, **APIS[route], **options)
    finally:
        versions.close()
    assert response.status_code == 200, response.text
    if not streamed:
        return dict(response.json()["usage"])
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return dict([found for line in lines if (found := usage_in(json.loads(line)))][-1])


def usage_in(event: dict[str, Any]) -> Any:
    return event.get("usage") or event.get("response", {}).get("usage")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(retry, "BACK_OFF_S", 0.0)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", APIS)
async def test_usage_has_the_borders_of_an_answer_and_no_such_field_without_any(route, streamed):
    async with fake_api() as api:
        other = await usage_of(api, route, {False: "old", True: "new"}, streamed=streamed)
        same = await usage_of(api, route, {False: "old", True: "old"}, streamed=streamed)
    assert other["numerics_borders"] == [{"index": 0, "tokens": BEFORE}]
    assert "numerics_borders" not in same
