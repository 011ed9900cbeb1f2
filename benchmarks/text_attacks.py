"""What others wait while a client's texts are made to cost an ingress or an engine as much as they can.

`quotes`: bodies of quotes, whose values are counted, while another client asks for one token of a fake engine.
`schemas`: schemas of one long `const` each, compiled while somebody else sends trivial ones, each of them new.
`rerank`: how long a ranking takes until its prompts are tokenized.
"""

from __future__ import annotations

import asyncio
import json
import random
import string
import tempfile
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import run
from engine import pocket
from engine.grammars.compiler import Compilation, GrammarCompiler
from engine.model.config import ModelConfig
from engine.pooling.prompts import PoolingPrompts
from engine.text.chat_tokenizer import ChatTokenizer
from engine.wire.parts.pooling import PoolingParams, SupportedTasks
from engine.wire.structured_outputs import StructuredOutputsParams
from tests.deployments.fake_api import fake_api, says
from tests.pooling_models import TOKENIZERS

CONST_CHARS = 190_000
TOKENIZED_AT_ONCE = 32  # as deployments/pooling/pooled_model.py has it


def main(
    attack: Annotated[str, typer.Argument(help="`quotes`, `schemas` or `rerank`.")],
    bodies: Annotated[int, typer.Option(help="Of quotes, at once.")] = 12,
    mib: Annotated[int, typer.Option(help="Of each.")] = 3,
    connections: Annotated[int, typer.Option(help="Each with one long schema at a time.")] = 16,
    seconds: Annotated[float, typer.Option(help="For which these are sent.")] = 15.0,
    documents: Annotated[int, typer.Option(help="Of the ranking.")] = 2000,
    query_chars: Annotated[int, typer.Option(help="Of its query.")] = 30_000,
) -> None:
    match attack:
        case "quotes":
            asyncio.run(quotes(bodies, mib))
        case "schemas":
            schemas(connections, seconds)
        case "rerank":
            rerank(documents, query_chars)
        case _:
            raise typer.BadParameter("quotes, schemas or rerank")


async def quotes(bodies: int, mib: int) -> None:
    body = b'{"prompt": "' + b"{" * 10_000 + b'\\"' * (mib * 2**19) + b'"}'
    headers = {"content-type": "application/json"}
    async with fake_api(says("ok")) as api:
        api.client.timeout = 600
        started = time.monotonic()
        sent = [
            asyncio.create_task(api.client.post("/v1/completions", content=body, headers=headers))
            for _ in range(bodies)
        ]
        waits = []
        while not all(task.done() for task in sent):
            asked = time.monotonic()
            (await api.post("completions", prompt="a", max_tokens=1)).raise_for_status()
            waits.append(time.monotonic() - asked)
            await asyncio.sleep(0.01)
        took_s = time.monotonic() - started
    print(f"{bodies} bodies of {mib} MiB were answered after {took_s:.2f} s; others waited at most {max(waits):.2f} s")


def schemas(connections: int, seconds: float) -> None:
    rng = random.Random(0)

    def start(schema: object) -> Compilation:
        return compiler.start(StructuredOutputsParams(json=json.dumps(schema)), [], time.monotonic())

    def long() -> Compilation:
        return start({"const": "".join(rng.choices(string.ascii_letters, k=CONST_CHARS))})

    vocab_size = ModelConfig.from_folder(pocket.PATH).vocab_size
    compiler = GrammarCompiler(pocket.PATH, vocab_size, frozenset([0]))
    live, waits = [long() for _ in range(connections)], list[float]()
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        live = [long() if each.compiled.done() else each for each in live]
        asked = time.monotonic()
        wait([start({"enum": [f"a{len(waits)}"]}).compiled], 120)
        waits.append(time.monotonic() - asked)
    compiler.close()
    waits.sort()
    print(f"{len(waits)} trivial schemas: median {waits[len(waits) // 2]:.3f} s, longest {waits[-1]:.3f} s")


def rerank(documents: int, query_chars: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        TOKENIZERS["wordpiece"]().save_pretrained(folder)
        tokenizer = ChatTokenizer.from_folder(Path(folder))
    prompts = PoolingPrompts(tokenizer, SupportedTasks(names=("score",)), 512)
    params = PoolingParams(task="score", truncate_prompt_tokens=-1)
    query = ("fox dog " * (query_chars // 8 + 1))[:query_chars]
    pairs = [(query, f"the lazy dog {i}") for i in range(documents)]
    started = time.monotonic()
    for at in range(0, documents, TOKENIZED_AT_ONCE):
        prompts.score(pairs[at : at + TOKENIZED_AT_ONCE], params)
    print(f"{documents} documents, a query of {query_chars} characters: {time.monotonic() - started:.2f} s")


if __name__ == "__main__":
    run(main)
