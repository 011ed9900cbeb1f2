"""The HTTP API over a scripted engine whose model does what it is told, so that clients of every kind can be led
through a conversation with a tool call.

`python -m tests.clients.obedient_server` prints its address and serves until it is killed.

A user's message `call NAME {JSON}` is answered by that call, a tool's result by `The tool said: ...`, a prompt of
answers.py as it says there, and all else by `I heard: ...`. Where a request has a grammar, the answer takes the first
of its forms that the grammar allows, as if sampled with it; if it allows none, the answer says so. Answers are of the
bundled model's tokens; its chat template builds the prompts.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path

import uvicorn

from engine.grammars.compiler import GrammarCompiler
from engine.model.checkpoint.resolve import resolve
from engine.text.chat_tokenizer import ChatTokenizer
from engine.wire.generate_request import GenerateRequest
from tests.clients.answers import Call, dumps, find
from tests.deployments.fake_api import fake_api
from tests.fake_engine import EOS

NAMES = ("obedient", "also-obedient")
LIMITS = {"max_model_len": 200_000, "vocab_size": 2**20, "max_waiting_tokens": 2_000_000}
TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
CALL = re.compile(r"\bcall (\w+) (\{.*\})")
TOOL = re.compile(r'^\{"type": "function", "function": \{"name": "([^"]+)"', re.MULTILINE)  # that the template offers
MAX_ECHO = 200
VOCAB_SIZE = 4096  # of the bundled model


def answer(prompt: str) -> list[str]:
    """Return all forms that the answer to a prompt may have, the one that a free model writes first. An object may also
    be the arguments of any tool, since some clients ask for objects in this way."""
    turns = TURN.findall(prompt)
    last = max((i for i, (role, _) in enumerate(turns) if role == "assistant"), default=-1)
    new = turns[last + 1 :]
    if results := [text for role, text in new if role == "tool"]:
        return [f"The tool said: {results[-1][:MAX_ECHO]}"]
    text = "\n".join(text for role, text in new if role == "user")
    found = CALL.search(text)
    match Call(found[1], json.loads(found[2])) if found else find(text):
        case Call() as call:
            return call.forms()
        case dict() as content:
            return [dumps(content), *(form for name in TOOL.findall(prompt) for form in Call(name, content).forms())]
        case None:
            return [f"I heard: {text[:MAX_ECHO]}"]
        case content:
            return [content]


class Model:
    """The script of a FakeEngine."""

    def __init__(self, folder: Path, tokenizer: ChatTokenizer):
        self._tokenizer = tokenizer
        self._grammars = GrammarCompiler(folder, VOCAB_SIZE, frozenset({EOS}))

    def __call__(self, request: GenerateRequest) -> list[int]:
        forms = answer(self._tokenizer.decode(request.prompt, skip_special_tokens=False))
        outputs = [self._tokenizer.encode(form, add_special_tokens=False) for form in forms]
        if (form := request.params.structured_outputs) is None:
            return [*outputs[0], EOS]
        grammar = self._grammars.start(form, [], time.monotonic()).compiled.result()
        for output in outputs:
            matcher = grammar.matcher.deep_copy()
            if matcher.try_consume_tokens(output) == len(output) and matcher.is_accepting():
                return [*output, EOS]
        refusal = f"The grammar allows none of {forms}: {form.text}"
        return [*self._tokenizer.encode(refusal, add_special_tokens=False), EOS]


async def main() -> None:
    folder = resolve("pocket")
    tokenizer = ChatTokenizer.from_folder(folder)
    model = Model(folder, tokenizer)
    async with fake_api(model, names=NAMES, text_model=tokenizer, **LIMITS) as api:
        web = uvicorn.Server(uvicorn.Config(api.app, port=0, log_level="warning", lifespan="off"))
        serving = asyncio.create_task(web.serve())
        while not web.started:
            await asyncio.sleep(0.01)
        print(f"http://127.0.0.1:{web.servers[0].sockets[0].getsockname()[1]}", flush=True)
        await serving


if __name__ == "__main__":
    asyncio.run(main())
