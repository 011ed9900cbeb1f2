"""The table of parts: any of them can be left out of it."""

from __future__ import annotations

import pytest

from deployments.frontend.api_keys import key_line
from deployments.http.middleware import AuthConfig
from deployments.parts import table
from tests.deployments.fake_api import fake_api, says

KEY = {"authorization": "Bearer sk-alice"}
AUTH = AuthConfig(
    api_keys=(key_line("alice", "sk-alice"),),
    admin_keys=("alice",),
    allow_runtime_key_updating=True,
    allow_runtime_lora_updating=True,
)
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "?"}], "max_tokens": 20}


@pytest.mark.parametrize("left_out", table.PARTS)
async def test_a_chat_is_answered_without_any_one_part_and_those_that_need_it(left_out, monkeypatch):
    names = [name for name in table.PARTS if name != left_out and left_out not in table.spec_of(name).needs]
    monkeypatch.setattr(table, "PARTS", names)
    async with fake_api(says("hello"), auth=AUTH, sdc_check_every=1) as api:
        answer = await api.client.post("/v1/chat/completions", json=CHAT, headers=KEY)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "hello"
        assert (await api.client.get("/openapi.json", headers=KEY)).status_code == 200
        health = await api.client.get("/health", headers=KEY)
        assert health.status_code == (404 if left_out == "operators" else 200)
