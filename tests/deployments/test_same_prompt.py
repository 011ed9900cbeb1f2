"""The same conversation gives the same prompt on every route, and in a tokenizer that serves without HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.cli.generate import to_request
from cluster.ray_data import ProcessorConfig, _Generate
from deployments.openai.batches.config import BatchConfig
from engine import LLM, SamplingParams
from tests.deployments.fake_api import fake_api
from tests.deployments.openai.batches.batches import client_of, ended, jsonl, line, start
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
async def test_a_conversation_has_one_prompt_on_all_routes(form, tmp_path):
    tokenizer = chat_tokenizer(FORMS[form])
    batches = BatchConfig(folder=str(tmp_path))
    async with fake_api(text_model=tokenizer, vocab_size=VOCAB_SIZE, batches=batches) as api:
        lines = []
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
            lines.append(
                {**line(str(len(lines)), "/v1/chat/completions"), "body": {"messages": messages, "max_tokens": 1}}
            )
        batch = await start(client_of(api), jsonl(*lines), "/v1/chat/completions")
        assert (await ended(client_of(api), batch.id)).request_counts.completed == len(lines)
        sent = [request.prompt for request in api.engine.added[-len(lines) :]]
        assert sorted(sent) == sorted(map(tokenizer.apply_chat_template, CONVERSATIONS))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("pocket", num_gpu_blocks_override=512, num_threads=1) as llm:
        yield llm


@pytest.mark.parametrize("form", FEW)
def test_a_conversation_has_the_same_prompt_without_a_server(form, llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", FORMS[form])
    rows = object.__new__(_Generate)  # without an engine of its own
    rows.llm, rows.config = llm, ProcessorConfig()
    for messages in CONVERSATIONS:
        expected = llm.tokenizer.apply_chat_template(messages)
        (chat,) = llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False, chat_template=FORMS[form])
        line_of_file, _ = to_request(llm, 0, {"messages": messages}, {})
        row, _ = rows.request({"messages": [{**message, "tool_calls": None} for message in messages]})
        for output in (chat, line_of_file, row):
            assert llm.tokenizer.decode(output.prompt_token_ids) == llm.tokenizer.decode(expected)
