"""Load on an OpenAI-compatible server, and how it held up. Metrics are defined and named as in vLLM's `bench serve`."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.progress import Progress

from cluster.cli.bench.arrivals import arrival_times
from cluster.cli.bench.distribution import Distribution
from cluster.cli.bench.load import ServeLoad
from cluster.cli.bench.openai_client import OpenAIClient, Outcome
from engine.errors import InvalidParameter, RequestError

LATENCIES = ("ttft", "tpot", "itl", "e2el")
SLO_METRICS = ("ttft", "tpot", "e2el")
SHOWN_ERRORS = 5


@dataclass(frozen=True, slots=True)
class ServeReport:
    """Totals are of the requests that completed.

    input_len, output_len: tokens of a prompt, shared prefix included, and tokens asked for.
    duration: seconds from the first request until the last answer.
    request_goodput: requests per second that met every objective; None if there was none to meet.
    latencies: milliseconds, by the names in LATENCIES: time to first token, per output token after it, between chunks,
        and to the end.
    errors: the commonest texts of failed requests, with their number.
    without_usage: requests whose tokens had to be counted by chunks, since the server did not say.
    client_cpu_share: of one core, that the load generator used. Near 1, it is what was measured.
    """

    base_url: str
    endpoint: str
    model: str
    num_prompts: int
    request_rate: float | Literal["inf"]
    burstiness: float
    max_concurrency: int | None
    input_len: int
    output_len: int
    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    latencies: dict[str, Distribution | None]
    errors: dict[str, int]
    without_usage: int
    client_cpu_share: float

    def flat(self) -> dict[str, Any]:
        """For JSON: latencies as vLLM writes them, `mean_ttft_ms` and so on."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "latencies"}
        for name, values in self.latencies.items():
            for statistic in ("mean", "median", "p90", "p99"):
                fields[f"{statistic}_{name}_ms"] = None if values is None else getattr(values, statistic)
        return fields


def measure(
    load: ServeLoad,
    *,
    base_url: str,
    model: str | None = None,
    api_key: str | None = None,
    timeout_s: float = 600.0,
    goodput: str | None = None,
    progress: Progress,
) -> ServeReport:
    """Raises EngineUnavailable if there is no server; requests that fail are counted."""
    objectives = parse_goodput(goodput) if goodput else {}
    return asyncio.run(_measure(load, base_url, model, api_key, timeout_s, objectives, progress))


async def _measure(
    load: ServeLoad, base_url: str, model: str | None, api_key: str | None, timeout_s: float, objectives: dict[str, float],
    progress: Progress,
) -> ServeReport:  # fmt: skip
    async with OpenAIClient(base_url, api_key, timeout_s) as client:
        served = await client.models()
        if model is None and not served:
            raise RequestError(f"model must be given: {client.base_url}/v1/models names none", "model")
        model = model or served[0]
        bodies, path = load.bodies(model), load.path
        times = arrival_times(load.num_prompts, load.request_rate, load.burstiness, load.seed)
        task = progress.add_task("warming up", total=len(bodies))
        for body in bodies[: load.num_warmups]:
            await client.send(path, body)
            progress.advance(task)
        progress.update(task, description="measuring")

        async def send(body: bytes) -> Outcome:
            outcome = await client.send(path, body)
            progress.advance(task)
            return outcome

        cpu, started = time.process_time(), time.perf_counter()
        outcomes = await send_all(send, bodies[load.num_warmups :], times, load.max_concurrency)
        duration = time.perf_counter() - started
        cpu_share = (time.process_time() - cpu) / duration
    return summarise(outcomes, duration, load, client.base_url, model, objectives, cpu_share)


async def send_all(
    send: Callable[[bytes], Any], bodies: Sequence[bytes], times: Sequence[float], max_concurrency: int | None
) -> list[Outcome]:
    """Send each body at its time, or as soon after as `max_concurrency` lets it."""
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()

    async def one(body: bytes) -> Outcome:
        async with gate:
            outcome: Outcome = await send(body)
            return outcome

    started, tasks = time.perf_counter(), []
    for body, at in zip(bodies, times, strict=True):
        delay = started + at - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        tasks.append(asyncio.create_task(one(body)))
    return await asyncio.gather(*tasks)


def parse_goodput(text: str) -> dict[str, float]:
    """ "ttft:200 tpot:50" -> milliseconds by metric."""
    objectives = {}
    for pair in text.split():
        name, _, value = pair.partition(":")
        try:
            objectives[name] = float(value)
        except ValueError:
            name = ""
        if name not in SLO_METRICS or not objectives[name] >= 0:
            raise InvalidParameter("goodput", text, "pairs like ttft:200 tpot:50 e2el:5000, in milliseconds")
    return objectives


def meets(outcome: Outcome, objectives: dict[str, float]) -> bool:
    """A single token has no time between tokens, and so keeps to any."""
    seconds = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s or 0.0, "e2el": outcome.e2el_s}
    return all(1e3 * seconds[name] <= limit for name, limit in objectives.items())


def summarise(
    outcomes: list[Outcome], duration: float, load: ServeLoad, base_url: str, model: str, objectives: dict[str, float],
    client_cpu_share: float,
) -> ServeReport:  # fmt: skip
    done = [outcome for outcome in outcomes if outcome.error is None]
    errors = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    own = load.prefix_len + load.input_len
    input_tokens = sum(own if o.prompt_tokens is None else o.prompt_tokens for o in done)
    output_tokens = sum(o.output_tokens for o in done)
    seconds = {
        "ttft": [o.ttft_s for o in done],
        "tpot": [o.tpot_s for o in done if o.tpot_s is not None],
        "itl": [gap for o in done for gap in o.itl_s],
        "e2el": [o.e2el_s for o in done],
    }
    return ServeReport(
        base_url=base_url,
        endpoint=load.endpoint,
        model=model,
        num_prompts=load.num_prompts,
        request_rate="inf" if math.isinf(load.request_rate) else load.request_rate,
        burstiness=load.burstiness,
        max_concurrency=load.max_concurrency,
        input_len=load.prefix_len + load.input_len,
        output_len=load.output_len,
        duration=duration,
        completed=len(done),
        failed=len(outcomes) - len(done),
        total_input_tokens=input_tokens,
        total_output_tokens=output_tokens,
        request_throughput=len(done) / duration,
        request_goodput=sum(meets(o, objectives) for o in done) / duration if objectives else None,
        output_throughput=output_tokens / duration,
        total_token_throughput=(input_tokens + output_tokens) / duration,
        latencies={name: Distribution.of([1e3 * s for s in seconds[name]]) for name in LATENCIES},
        errors=dict(errors.most_common(SHOWN_ERRORS)),
        without_usage=sum(not o.has_usage for o in done),
        client_cpu_share=client_cpu_share,
    )
