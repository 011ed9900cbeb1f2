"""python -m benchmarks.routing_decision [engines [blocks]]   time and memory of one routing decision, in a large
cluster, in CPU time. blocks: that each engine has."""

from __future__ import annotations

import gc
import random
import resource
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from functools import partial
from typing import get_args

from deployments.routing.balancer import Balancer
from deployments.routing.config import PolicyName, RoutingConfig
from deployments.routing.prompt_digest import PromptDigest, PromptDigester
from engine.wire.block_hash import BLOCK_HASH_BYTES
from engine.wire.messages import EngineUpdate
from engine.wire.stats.engine_stats import EngineLoad

BLOCK_SIZE, PROMPT = 16, 10_000
SHARED = 400  # leading blocks of the prompt that each engine has
ROUNDS = 200
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


def main(num_engines: int = 100, num_blocks: int = 100_000) -> None:
    rng = random.Random(0)
    routers = {policy: Balancer(RoutingConfig(policy=policy), "decode", BLOCK_SIZE, rng) for policy in POLICIES}
    router = routers["prefix_aware"]
    tokens = [rng.randrange(100_000) for _ in range(PROMPT)]
    prompt = PromptDigester(BLOCK_SIZE).digest("r", tokens, "")
    words = array("Q", (word for key in prompt.keys[:SHARED] for word in (key, 0)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    engines = [f"decode-m-{number:03d}" for number in range(num_engines)]
    for engine in engines:
        others = rng.randbytes((num_blocks - SHARED) * BLOCK_HASH_BYTES)
        load = EngineLoad(rng.randrange(50), rng.randrange(5000), rng.randrange(num_blocks // 2), 256, num_blocks)
        router.update(update(engine, load, words.tobytes() + others))
    mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{num_engines} engines of {num_blocks} blocks, prompts of {PROMPT} tokens: {mib:.0f} MiB")
    times(
        f"hashes of the {PROMPT // BLOCK_SIZE} blocks",
        lambda i: PromptDigester(BLOCK_SIZE).digest("r", list(tokens), ""),
    )
    for policy, other in routers.items():
        other.placements = router.placements
        for name, session in ((policy, ""), (f"{policy}, with a session", "s")):
            times(f"choice by {name}", partial(choose, other, prompt, session, engines))
    small = engines[0]
    stored = [rng.randbytes(50 * BLOCK_HASH_BYTES) for _ in range(ROUNDS)]
    times("a full round of the garbage collector, part of the p99 above", lambda i: gc.collect(), rounds=3)
    times("update of 50 new blocks", lambda i: router.update(update(small, EngineLoad(), stored[i], number=i + 1)))


def choose(router: Balancer, prompt: PromptDigest, session: str, engines: list[str], number: int) -> None:
    request = PromptDigest(f"r{number}", prompt.num_tokens, prompt.keys, session)
    router.choose(request, engines)
    router.end(request.request_id, confirmed=False)


def update(engine: str, load: EngineLoad, stored: bytes, number: int = 0) -> EngineUpdate:
    return EngineUpdate(
        engine_id=engine,
        number=number,
        snapshot=not number,
        load=load,
        stored=stored,
        removed=b"",
        admitted=[],
        prefilled=[],
    )


def times(what: str, call: Callable[[int], object], rounds: int = ROUNDS) -> None:
    seconds = []
    for number in range(rounds):
        start = time.process_time()
        call(number)
        seconds.append(time.process_time() - start)
    print(f"{what}: {statistics.median(seconds) * 1e3:.3f} ms, p99 {sorted(seconds)[int(0.99 * rounds)] * 1e3:.3f} ms")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
