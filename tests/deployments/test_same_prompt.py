"""The same conversation gives the same prompt on every route, and in a tokenizer that serves without HTTP."""

from __future__ import annotations

import pytest

from tests.deployments.fake_api import fake_api
from tests.deployments.openai.chat_models import VOCAB_SIZE, chat_tokenizer
from tests.engine.text.template_forms import FORMS

USER, ANSWER = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}
RULE = {"role": "system", "content": "Be brief."}
CONVERSATIONS = [
    [RULE, USER],
    [USER, ANSWER, RULE, USER],
    [RULE, USER, RULE],
    [RULE, USER, ANSWER, RULE, {"role": "user", "content": "And now?"}],
]


FEW = ["first system, known roles", "later system raises", "no system, in turns", "parts, any role"]


@pytest.mark.parametrize("form", FEW)
async def test_a_conversation_has_one_prompt_on_all_routes(form):
    tokenizer = chat_tokenizer(FORMS[form])
    async with fake_api(text_model=tokenizer, vocab_size=VOCAB_SIZE) as api:
        for messages in CONVERSATIONS:
            developers = [{**m, "role": "developer"} if m["role"] == "system" else m for m in messages]
            expected = tokenizer.apply_chat_template(messages)
            await api.post("chat/completions", messages=messages, max_tokens=1)
            await api.post("chat/completions", messages=developers, max_tokens=1)
            await api.post("responses", input=messages, max_output_tokens=1)
            await api.post("responses", input=developers, max_output_tokens=1)
            await api.client.post("/v1/messages", json={"model": "fake", "messages": messages, "max_tokens": 1})
            sent = [request.prompt for request in api.engine.added[-5:]]
            sent.append((await api.client.post("/tokenize", json={"messages": messages})).json()["tokens"])
            assert [tokenizer.decode(prompt) for prompt in sent] == [tokenizer.decode(expected)] * 6
