"""The HTTP API over a scripted engine whose model does what it is told, so that clients of every kind can be led
through a conversation with a tool call.

`python -m tests.clients.obedient_server` prints its address and serves until it is killed.

A user's message `call NAME {JSON}` is answered by that call, in Hermes' format; a tool's result by `The tool said: ...`
and all else by `I heard: ...`. Answers are of the bundled model's tokens; its chat template builds the prompts.
"""

from __future__ import annotations

import asyncio
import re

import uvicorn

from deployments.app import http_app
from engine.model.checkpoint.folder import resolve
from engine.text.tokenizer import Tokenizer
from engine.wire.generate_request import GenerateRequest
from engine.wire.structured_outputs import StructuredOutputsParams
from tests.deployments.fake_api import fake_api
from tests.fake_engine import EOS

MODEL = "obedient"
LIMITS = {"max_model_len": 200_000, "vocab_size": 2**20, "max_waiting_tokens": 2_000_000}
TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
CALL = re.compile(r"\bcall (\w+) (\{.*\})")
MAX_ECHO = 200


def answer(prompt: str, forced: StructuredOutputsParams | None) -> str:
    """forced: the form that the answer must have; a strict tool's is that of any call."""
    turns = TURN.findall(prompt)
    last = max((i for i, (role, _) in enumerate(turns) if role == "assistant"), default=-1)
    new = turns[last + 1 :]
    if results := [text for role, text in new if role == "tool"]:
        return f"The tool said: {results[-1][:MAX_ECHO]}"
    text = "\n".join(text for role, text in new if role == "user")
    if found := CALL.search(text):
        call = f'{{"name": "{found[1]}", "arguments": {found[2]}}}'
        if forced is not None and isinstance(forced.json, dict):
            return found[2] if forced.json["type"] == "object" else f"[{call}]"
        return f"<tool_call>\n{call}\n</tool_call>"
    return f"I heard: {text[:MAX_ECHO]}"


async def main() -> None:

    tokenizer = Tokenizer.from_folder(resolve("pocket"))

    def script(request: GenerateRequest) -> list[int]:
        prompt = tokenizer.decode(request.prompt, skip_special_tokens=False)
        return [*tokenizer.encode(answer(prompt, request.params.structured_outputs), add_special_tokens=False), EOS]

    async with fake_api(script, names=(MODEL,), text_model=tokenizer, **LIMITS) as api:
        app = http_app({MODEL: api.model}, api.telemetry)
        web = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
        serving = asyncio.create_task(web.serve())
        while not web.started:
            await asyncio.sleep(0.01)
        print(f"http://127.0.0.1:{web.servers[0].sockets[0].getsockname()[1]}", flush=True)
        await serving


if __name__ == "__main__":
    asyncio.run(main())
