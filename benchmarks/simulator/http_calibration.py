"""Fits what the steps of a running cluster cost, and what HTTP adds to that, by a client's clock alone.

python -m benchmarks.simulator.http_calibration --base-url http://127.0.0.1:8000 --replicas 2 --output cost.json

The cost includes what the engines do beside computing, and whatever else their machines do; fit.py, which gives an
engine a process to itself, knows nothing of that. `manta simulate --cost cost.json` uses the result.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.command import run
from cluster.cli.bench.openai_client import OpenAIClient, RequestResult, StreamChunk, StreamFailed
from cluster.cli.bench.prompts import random_ids
from cluster.lab.recorded.cost_fit import non_negative
from cluster.lab.simulator.cost_model import LinearCostModel, Work
from engine.errors import EngineUnavailable, RequestError

PATH = "/v1/completions"
TIMEOUT_S = 60.0
VOCABULARY = 1000  # ids below it are words in any vocabulary
PROMPTS = (16, 64, 128, 256, 500, 900)
STREAMS = (2, 4, 8, 16)
ALONE, TOGETHER = 24, 48  # tokens of an answer
BESIDE, BACKGROUND = 2, 400  # streams at each replica while prompts come, and the tokens of their answers
ROUNDS = 3
CONTENTIONS = np.linspace(0, 2, 81).tolist()


@dataclass(frozen=True, slots=True)
class Probe:
    """streams: at a time. prompt, output: tokens of each. engines: that share the streams equally."""

    streams: int
    prompt: int
    output: int
    engines: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """A time that a client saw. features: requests on their way through HTTP, busy replicas beside it, steps, and the
    sum of the steps' Work. others: replicas that computed meanwhile."""

    features: NDArray[np.float64]
    seconds: float
    others: int = 0


@dataclass(frozen=True, slots=True)
class HttpFit:
    """request_s: of the time to the first token, what is not steps. contention, busy_s: as in
    ClusterSpec and SlowCalls. times: that it was fitted to. error: median of |predicted - measured| / measured over
    them."""

    cost: LinearCostModel
    request_s: float
    busy_s: float
    contention: float
    times: int
    error: float


REQUEST = np.array([1.0, 0, 0, 0, 0, 0, 0])
BUSY = np.array([0, 1.0, 0, 0, 0, 0, 0])
NOTHING = Work(0, 0, 0, 0)


def step(work: Work) -> NDArray[np.float64]:
    return np.array([0, 0, 1, *work], dtype=np.float64)


def decoding(streams: int, context: int) -> Work:
    """context: of each stream."""
    return Work(streams, streams, streams * context, streams * context)


def prefill(prompt: int, budget: int, beside: Work = NOTHING) -> NDArray[np.float64]:
    """The steps of a prompt, each with what others compute in it. budget: tokens of a step at most."""
    total = np.zeros(len(REQUEST))
    for start in range(0, prompt, budget):
        count = min(budget, prompt - start)
        own = Work(count, 1, count * start + count * (count + 1) // 2, start + count)
        total += step(Work(*(int(a + b) for a, b in zip(own, beside, strict=True))))
    return total


def first_token_beside(prompt: int, budget: int, replicas: int, apart: bool) -> NDArray[np.float64]:
    """Return the features of a first token beside BESIDE streams at each replica: it waits for half a step at first.

    apart: prompts are computed elsewhere, so that it waits twice, and the steps of its prompt are its own.
    """
    others, way = decoding(BESIDE, BACKGROUND // 2), REQUEST + replicas * BUSY
    if apart:
        return way + prefill(prompt, budget) + step(others)
    return way + prefill(prompt, budget, others) + step(others) / 2


def probes(replicas: int) -> list[Probe]:
    """One request at a time; one at each replica, so that all are busy; and several at each."""
    alone = [Probe(1, prompt, ALONE) for prompt in PROMPTS]
    each = [Probe(replicas, prompt, ALONE, replicas) for prompt in PROMPTS] if replicas > 1 else []
    together = [Probe(n * replicas, prompt, TOGETHER, replicas) for n in STREAMS for prompt in PROMPTS[:3:2]]
    return [*alone, *each, *together]


def fit_observations(found: Sequence[Observation]) -> HttpFit:
    """Least squares of the relative error, no part negative; of all CONTENTIONS, the one with the smallest."""
    features = np.array([observation.features for observation in found])
    others = np.array([observation.others for observation in found])
    measured = np.array([observation.seconds for observation in found])

    def fitted(contention: float) -> tuple[float, HttpFit]:
        slowed = features.copy()
        slowed[:, 2:] *= (1 + contention * others)[:, None]
        coefficients = non_negative(slowed / measured[:, None])
        errors = np.abs(slowed @ coefficients - measured) / measured
        request_s, busy_s, *cost = coefficients.tolist()
        fit = HttpFit(LinearCostModel(*cost), request_s, busy_s, contention, len(found), float(np.median(errors)))
        return float(errors @ errors), fit

    tried = [fitted(contention) for contention in (CONTENTIONS if others.any() else [0.0])]
    return min(tried, key=lambda each: each[0])[1]


async def fit_cluster(base_url: str, replicas: int, budget: int) -> HttpFit:
    """The first model that the cluster names. See `observe`. Raises ServingError."""
    async with OpenAIClient(base_url, None, TIMEOUT_S) as client:
        served = await client.models()
        if not served:
            raise RequestError(f"{client.base_url} does not say what it serves", "base_url")
        await observe(client, served[0], replicas, budget, rounds=1)  # connects, and compiles what is not yet compiled
        return fit_observations(await observe(client, served[0], replicas, budget))


async def observe(
    client: OpenAIClient,
    model: str,
    replicas: int,
    budget: int,
    *,
    apart: bool = False,
    rounds: int = ROUNDS,
) -> list[Observation]:
    """Nobody else should use the cluster meanwhile. The prompts are in no cache.

    replicas: that decode. budget: tokens of a step at most. apart: whether others compute the prompts. rounds: of each
    probe.
    Raises EngineUnavailable if a request fails, and RequestError if tokens do not come one by one.
    """
    rng, found = random.Random(), []
    for probe in probes(replicas):
        first_s: list[float] = []
        gaps_s: list[float] = []
        for _ in range(rounds):
            bodies = [_body(model, rng, probe.prompt, probe.output) for _ in range(probe.streams)]
            for outcome in await asyncio.gather(*(_send(client, body) for body in bodies)):
                first_s.append(outcome.ttft_s)
                gaps_s += _in_the_middle(outcome)
        found += observations(probe, budget, first_s, gaps_s)
    if all(observation.features[0] for observation in found):
        raise RequestError(f"{client.base_url} streams several tokens at a time: a step takes nobody knows what")
    beside: dict[int, list[float]] = {prompt: [] for prompt in PROMPTS}
    for _ in range(rounds):
        await _beside(client, model, rng, replicas, beside)
    for prompt, seconds in beside.items():
        if seconds:
            observed, others = first_token_beside(prompt, budget, replicas, apart), replicas if apart else replicas - 1
            found.append(Observation(observed, statistics.median(seconds), others))
    return found


def observations(probe: Probe, budget: int, first_s: Sequence[float], gaps_s: Sequence[float]) -> list[Observation]:
    """first_s: times to first tokens. gaps_s: between tokens, while all streams ran."""
    found = []
    streams, others = probe.streams // probe.engines, probe.engines - 1
    if streams == 1:
        found.append(Observation(REQUEST + prefill(probe.prompt, budget), statistics.median(first_s), others))
    if sum(gaps_s) > 0:
        work = decoding(streams, probe.prompt + probe.output // 2)
        found.append(Observation(step(work), statistics.fmean(gaps_s), others))
    return found


async def _beside(
    client: OpenAIClient, model: str, rng: random.Random, replicas: int, found: dict[int, list[float]]
) -> None:
    """Prompts one after another, as long as streams decode at all replicas."""
    bodies = [_body(model, rng, PROMPTS[0], BACKGROUND) for _ in range(BESIDE * replicas)]
    try:
        streams = await asyncio.gather(*(_started(client.chunks(PATH, body)) for body in bodies))
        ends = [asyncio.create_task(_drain(stream)) for stream in streams]
        for prompt, seconds in found.items():
            outcome = await _send(client, _body(model, rng, prompt, 1))
            if not any(end.done() for end in ends):
                seconds.append(outcome.ttft_s)
        await asyncio.gather(*ends)
    except StreamFailed as error:
        raise EngineUnavailable(str(error)) from None


async def _started(chunks: AsyncGenerator[StreamChunk]) -> AsyncGenerator[StreamChunk]:
    """Returns when the first token has come."""
    await anext(chunks)
    return chunks


async def _drain(chunks: AsyncGenerator[StreamChunk]) -> None:
    async for _ in chunks:
        pass


async def _send(client: OpenAIClient, body: bytes) -> RequestResult:
    outcome = await client.send(PATH, body)
    if outcome.error is not None:
        raise EngineUnavailable(outcome.error)
    return outcome


def _body(model: str, rng: random.Random, prompt: int, output: int) -> bytes:
    return completion(model, random_ids(rng, prompt, VOCABULARY), output)


def completion(model: str, prompt: list[int], output: int, **options: str) -> bytes:
    """The body of a request for `output` tokens, each of which brings text, whatever the model would rather say."""
    asked = {"model": model, "prompt": prompt, "max_tokens": output, "temperature": 0.0, "ignore_eos": True}
    shown = {"skip_special_tokens": False, "stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode(asked | shown | options)


def _in_the_middle(outcome: RequestResult) -> list[float]:
    """Times between tokens while all streams of a probe run; none where chunks are not tokens."""
    gaps = outcome.itl_s
    return gaps[len(gaps) // 4 : -(len(gaps) // 4)] if len(gaps) == outcome.output_tokens - 1 else []


def main(
    output: Annotated[Path, typer.Option(dir_okay=False, help="File for `manta simulate --cost`.")],
    base_url: Annotated[str, typer.Option(help="Of the running cluster, which has one pool, and no other user.")],
    replicas: Annotated[int, typer.Option(min=1, help="Of the running cluster.")] = 1,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Of its engines.")] = 2048,
) -> None:
    """Fit the steps of a running cluster and its requests' way through HTTP, in some 15 s."""
    found = asyncio.run(fit_cluster(base_url, replicas, max_num_batched_tokens))
    write_cost(found, output)
    for name, seconds in (asdict(found.cost) | {"request_s": found.request_s, "busy_s": found.busy_s}).items():
        print(f"{name:12}{1e6 * seconds:12.4f} µs")
    print(f"a step takes {found.contention:.0%} longer for each other replica that computes")
    print(f"{found.times} times that a client saw; error of one: median {found.error:.1%}")


def write_cost(found: HttpFit, path: Path) -> None:
    path.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run(main)
