"""Sends load to an OpenAI-compatible server and measures its latencies. Metrics are defined and named as in vLLM's
`bench serve`."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.progress import Progress

from cluster.cli.bench.distribution import Distribution
from cluster.cli.bench.load import ServeLoad
from cluster.cli.bench.openai_client import OpenAIClient, RequestResult
from cluster.cli.bench.turns import send_turns
from engine.errors import InvalidParameter, RequestError

SLO_METRICS = ("ttft", "tpot", "e2el")
SHOWN_ERRORS = 5
LOAD_FIELDS = (
    "endpoint", "num_prompts", "request_rate", "burstiness", "max_concurrency", "input_len", "output_len",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServeReport:
    """Report of a load test. Totals count only the requests that completed."""

    base_url: str
    model: str
    load: ServeLoad
    duration: float  #: seconds from the first request to the last answer
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    total_cached_tokens: int | None  #: input tokens that the server found cached; None if it does not tell
    request_goodput: float | None  #: requests per second that met all objectives; None without objectives
    latencies: dict[str, Distribution | None]
    """Milliseconds: `ttft` to the first token, `tpot` per token after it, `itl` between chunks, `e2el` to the end."""
    errors: dict[str, int]  #: the commonest messages of failed requests, and their counts
    without_usage: int  #: requests whose tokens were counted by chunks, because the server sent no usage
    client_cpu_share: float  #: fraction of a core that the load generator used; near 1, it was the bottleneck
    outcomes: list[RequestResult]  #: of all requests, for charts

    @property
    def throughputs(self) -> dict[str, float]:
        """Requests and tokens per second."""
        outputs, inputs = self.total_output_tokens, self.total_input_tokens
        return {
            "request_throughput": self.completed / self.duration,
            "output_throughput": outputs / self.duration,
            "total_token_throughput": (inputs + outputs) / self.duration,
        }

    def flat(self) -> dict[str, Any]:
        """Return the fields for JSON, under vLLM's names: `mean_ttft_ms` and so on."""
        fields = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("load", "latencies", "outcomes")
        }
        load = {name: getattr(self.load, name) for name in LOAD_FIELDS}
        if math.isinf(self.load.request_rate):
            load["request_rate"] = "inf"
        load["input_len"] += self.load.prefix_len
        for name, values in self.latencies.items():
            for statistic in ("mean", "median", "p90", "p99"):
                fields[f"{statistic}_{name}_ms"] = None if values is None else getattr(values, statistic)
        return load | fields | self.throughputs


async def measure(
    load: ServeLoad, client: OpenAIClient, model: str | None, objectives: dict[str, float], progress: Progress
) -> ServeReport:
    """Send the load to a server, and return the report. Failed requests are counted. Raises EngineUnavailable if there
    is no server."""
    async with client:
        served = await client.models()
        if model is None and not served:
            raise RequestError(f"model must be given: {client.base_url}/v1/models names none", "model")
        model = model or served[0]
        bodies = load.bodies(model)
        task = progress.add_task("warming up", total=len(bodies))

        async def send(body: bytes, session: str = "") -> RequestResult:
            outcome = await client.send(load.path, body, session)
            progress.advance(task)
            return outcome

        for body in bodies[: load.num_warmups]:
            await send(body)
        progress.update(task, description="measuring")
        cpu, started = time.process_time(), time.perf_counter()
        measured, times, turns = bodies[load.num_warmups :], load.times(), load.turns
        if turns is None:
            outcomes = await send_all(send, measured, times, load.max_concurrency)
        else:
            outcomes = await send_turns(send, measured, times, turns, load.max_concurrency)
        duration = time.perf_counter() - started
        cpu_share = (time.process_time() - cpu) / duration
    return summarise(outcomes, duration, load, client.base_url, model, objectives, cpu_share)


async def send_all(
    send: Callable[[bytes], Awaitable[RequestResult]],
    bodies: Sequence[bytes],
    times: Sequence[float],
    max_concurrency: int | None,
) -> list[RequestResult]:
    """Send each body at its time, or as soon afterwards as `max_concurrency` allows."""
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()

    async def one(body: bytes) -> RequestResult:
        async with slots:
            return await send(body)

    started, tasks = time.perf_counter(), []
    for body, at in zip(bodies, times, strict=True):
        delay = started + at - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        tasks.append(asyncio.create_task(one(body)))
    return await asyncio.gather(*tasks)


def parse_goodput(text: str) -> dict[str, float]:
    """Parse "ttft:200 tpot:50". Returns milliseconds by metric."""
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


def meets(outcome: RequestResult, objectives: dict[str, float]) -> bool:
    """Return whether a request met all objectives. A request of one token has no time between tokens, so it meets any
    `tpot`."""
    seconds = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s or 0.0, "e2el": outcome.e2el_s}
    return all(1e3 * seconds[name] <= limit for name, limit in objectives.items())


def summarise(
    outcomes: list[RequestResult], duration: float, load: ServeLoad, base_url: str, model: str,
    objectives: dict[str, float], client_cpu_share: float,
) -> ServeReport:  # fmt: skip
    done = [outcome for outcome in outcomes if outcome.error is None]
    cached = [o.cached_tokens for o in done if o.cached_tokens is not None]
    errors = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    prompt = load.prefix_len + load.input_len
    seconds = {
        "ttft": [o.ttft_s for o in done],
        "tpot": [o.tpot_s for o in done if o.tpot_s is not None],
        "itl": [gap for o in done for gap in o.itl_s],
        "e2el": [o.e2el_s for o in done],
    }
    return ServeReport(
        base_url=base_url,
        model=model,
        load=load,
        duration=duration,
        completed=len(done),
        failed=len(outcomes) - len(done),
        total_input_tokens=sum(prompt if o.prompt_tokens is None else o.prompt_tokens for o in done),
        total_output_tokens=sum(o.output_tokens for o in done),
        total_cached_tokens=sum(cached) if cached else None,
        request_goodput=sum(meets(o, objectives) for o in done) / duration if objectives else None,
        latencies={name: Distribution.of([1e3 * s for s in values]) for name, values in seconds.items()},
        errors=dict(errors.most_common(SHOWN_ERRORS)),
        without_usage=sum(not o.has_usage for o in done),
        client_cpu_share=client_cpu_share,
        outcomes=outcomes,
    )
