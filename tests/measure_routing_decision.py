"""python -m tests.measure_routing_decision   time and memory of one routing decision, in a large cluster."""

from __future__ import annotations

import gc
import random
import resource
import statistics
import sys
import time
from array import array
from collections.abc import Callable

from deployments.routing.balancer import Balancer
from deployments.routing.config import RoutingConfig
from deployments.routing.cost import Prompt
from deployments.routing.prompts import PromptReader
from engine.messages import NAME_BYTES, EngineLoad, EngineNews

ENGINES, BLOCKS, BLOCK_SIZE, PROMPT = 100, 100_000, 16, 10_000
SHARED = 400  # leading blocks of the prompt that each engine has
ROUNDS = 200


def main() -> None:
    rng = random.Random(0)
    router = Balancer(RoutingConfig(), "decode", BLOCK_SIZE, rng)
    tokens = [rng.randrange(100_000) for _ in range(PROMPT)]
    prompt = PromptReader(BLOCK_SIZE).read("r", tokens, "")
    words = array("Q", (word for key in prompt.keys[:SHARED] for word in (key, 0)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    engines = [f"decode-m-{number:03d}" for number in range(ENGINES)]
    for engine in engines:
        others = rng.randbytes((BLOCKS - SHARED) * NAME_BYTES)
        load = EngineLoad(rng.randrange(50), rng.randrange(5000), rng.randrange(50_000), 256, BLOCKS)
        router.news(news(engine, load, words.tobytes() + others))
    mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{ENGINES} engines of {BLOCKS} blocks, prompts of {PROMPT} tokens in blocks of {BLOCK_SIZE}: {mib:.0f} MiB")
    times(f"names of the {PROMPT // BLOCK_SIZE} blocks", lambda i: PromptReader(BLOCK_SIZE).read("r", list(tokens), ""))
    for name, session in (("prefix", ""), ("prefix, with a session", "s")):
        times(f"choice by {name}", lambda i, s=session: place(router, prompt, i, s, engines))
    small = engines[0]
    stored = [rng.randbytes(50 * NAME_BYTES) for _ in range(ROUNDS)]
    times("a full round of the garbage collector, part of the p99 above", lambda i: gc.collect(), rounds=3)
    times("news of 50 new blocks", lambda i: router.news(news(small, EngineLoad(), stored[i], number=i + 1)))


def place(router: Balancer, prompt: Prompt, number: int, session: str, engines: list[str]) -> None:
    request = Prompt(f"r{number}", prompt.num_tokens, prompt.keys, session)
    router.choose(request, engines)
    router.end(request.request_id, confirmed=False)


def news(engine: str, load: EngineLoad, stored: bytes, number: int = 0) -> EngineNews:
    return EngineNews(
        engine_id=engine,
        number=number,
        snapshot=not number,
        load=load,
        stored=stored,
        removed=b"",
        taken=[],
        settled=[],
    )


def times(what: str, call: Callable[[int], object], rounds: int = ROUNDS) -> None:
    taken = []
    for number in range(rounds):
        start = time.perf_counter()
        call(number)
        taken.append(time.perf_counter() - start)
    print(f"{what}: {statistics.median(taken) * 1e3:.3f} ms, p99 {sorted(taken)[int(0.99 * rounds)] * 1e3:.3f} ms")


if __name__ == "__main__":
    sys.exit(main())
