"""How exact limits of API keys are over several ingresses, and how long requests wait for them, while ingresses and
Redis are killed: `python -m benchmarks.quotas`.

Each ingress is a process with the code that charges requests, and no engine. Three keys ask for more than their limits
allow: requests per minute, tokens per minute, and engine seconds in ten seconds. Tokens and costs of a request are
known only when it has ended. Redis keeps nothing on disk, so each of its deaths loses all values.
"""

from __future__ import annotations

import asyncio
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import JsonOption, print_report, run
from cluster.terminal.tables import figure, make_table, show
from deployments.billing.bill import Bill, Used
from deployments.frontend.observers import RequestSize
from deployments.quotas.errors import QuotaExceeded
from deployments.quotas.key_quota import RequestQuota
from deployments.quotas.limits import BudgetLimit, KeyLimits, window
from deployments.quotas.quotas import Quotas
from deployments.storage.key_value import StoreUnavailable
from deployments.storage.redis import RedisStore
from tests.processes import started
from tests.redis_server import redis_server

PROMPT, OUTPUT = 100, 100  # tokens of a request, of outputs the mean
COST_S = 0.01  # mean engine seconds of a request
RUNS_S = 0.1  # how long a request runs
AWAY_S = 3.0  # how long Redis is away
KEYS = ("requests", "tokens", "engine seconds")
WINDOWS = {"requests": "1m", "tokens": "1m", "engine seconds": "10s"}
ADMITTED, REFUSED, UNAVAILABLE = range(3)
ENTRY = struct.Struct("<dBBdd")  # when it was decided, key, outcome, seconds that it took, what was used


def limits(rate: float) -> dict[str, KeyLimits]:
    """Return limits that admit about 60 % of the requests. rate: requests per second of each key."""
    admitted = 0.6 * rate
    budget = BudgetLimit(budget_duration="10s", max_engine_seconds=admitted * 10 * COST_S)
    return {
        "requests": KeyLimits(rpm_limit=int(admitted * 60)),
        "tokens": KeyLimits(tpm_limit=int(admitted * 60 * (PROMPT + OUTPUT))),
        "engine seconds": KeyLimits(budget_limits=(budget,)),
    }


@dataclass(slots=True)
class KeyReport:
    limit: float
    used: list[float] = field(default_factory=list)
    """In each whole window."""
    waits_s: list[float] = field(default_factory=list)
    """Seconds until requests were admitted or refused."""
    outcomes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QuotasReport:
    ingresses: int
    rate: float
    kills: int
    redis_kills: int
    keys: dict[str, KeyReport]


def ingress(url: str, path: str, number: int, ingresses: int, rate: float) -> None:
    """The process of an ingress. rate: requests per second of each key in all ingresses."""
    asyncio.run(_ingress(url, path, number, ingresses, rate))


async def _ingress(url: str, path: str, number: int, ingresses: int, rate: float) -> None:
    rng, log = random.Random(f"{number} {time.time()}"), os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
    quotas = Quotas(RedisStore(url), limits(rate), ingresses)

    async def request(key: int, quota: RequestQuota) -> None:
        output, cost = rng.randrange(2 * OUTPUT), rng.uniform(0, 2 * COST_S)
        amount = (1.0, float(PROMPT + output), cost)[key]
        began = time.perf_counter()
        try:
            bill = Bill(lambda: Used(True, PROMPT, output, cost, 0.0), lambda known: known())
            async with quota.charged(RequestSize(PROMPT, 1, 2 * OUTPUT), bill):
                entry = ENTRY.pack(time.time(), key, ADMITTED, time.perf_counter() - began, amount)
                os.write(log, entry)
                await asyncio.sleep(RUNS_S)
        except (QuotaExceeded, StoreUnavailable) as error:
            outcome = REFUSED if isinstance(error, QuotaExceeded) else UNAVAILABLE
            os.write(log, ENTRY.pack(time.time(), key, outcome, time.perf_counter() - began, 0.0))

    tasks = set[asyncio.Task[None]]()
    at = time.monotonic()
    while True:
        at += rng.expovariate(rate * len(KEYS) / ingresses)
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        key = rng.randrange(len(KEYS))
        quota = quotas.of(KEYS[key])
        assert quota is not None, "every key has limits"
        task = asyncio.create_task(request(key, quota))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def measure(ingresses: int, rate: float, minutes: int, kill_every_s: float, redis_kills: int) -> QuotasReport:
    each = rate / len(KEYS)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis = stack.enter_context(redis_server())
        processes: list[subprocess.Popen[str]] = []

        def start(number: int) -> subprocess.Popen[str]:
            call = f"ingress({redis.url!r}, {str(folder / 'log')!r}, {number}, {ingresses}, {each})"
            command = [sys.executable, "-c", f"from benchmarks.quotas import ingress; {call}"]
            return stack.enter_context(started(command))

        processes += [start(number) for number in range(ingresses)]
        time.sleep(60 - time.time() % 60)  # until a window begins
        begin, end, kills = time.time(), time.time() + minutes * 60, 0
        redis_at = [begin + (i + 0.7) * minutes * 60 / max(1, redis_kills) for i in range(redis_kills)]
        back_at = float("inf")
        while (now := time.time()) < end:
            if kill_every_s and now > begin + (kills + 1) * kill_every_s:
                number = kills % ingresses
                processes[number].kill()
                processes[number] = start(number)
                kills += 1
            if redis_at and now > redis_at[0]:
                redis_at, back_at = redis_at[1:], now + AWAY_S
                redis.kill()
            if now > back_at:
                back_at = float("inf")
                redis.start()
            time.sleep(0.05)
        for process in processes:
            process.kill()
        return _report(folder / "log", ingresses, rate, kills, redis_kills, begin, end)


def _report(
    path: Path, ingresses: int, rate: float, kills: int, redis_kills: int, begin: float, end: float
) -> QuotasReport:
    found = {name: KeyReport(limit.all()[0].value) for name, limit in limits(rate / len(KEYS)).items()}
    used, outcomes = defaultdict[tuple[str, float], float](float), Counter[tuple[str, int]]()
    for at, key, outcome, seconds, amount in _entries(path):
        name = KEYS[key]
        used[name, window(WINDOWS[name], at)[0]] += amount
        outcomes[name, outcome] += 1
        found[name].waits_s.append(seconds)
    for name, report in found.items():
        length = {"1m": 60, "10s": 10}[WINDOWS[name]]
        report.used = [v for (n, start), v in sorted(used.items()) if n == name and begin - 1 <= start <= end - length]
        names = ("admitted", "refused", "unavailable")
        report.outcomes = {what: outcomes[name, outcome] for outcome, what in enumerate(names)}
    return QuotasReport(ingresses, rate, kills, redis_kills, found)


def _entries(path: Path) -> Iterator[tuple[float, int, int, float, float]]:
    data = path.read_bytes()
    yield from ENTRY.iter_unpack(data[: len(data) // ENTRY.size * ENTRY.size])


def _quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def show_report(report: QuotasReport) -> None:
    table = make_table(
        "limit of", "limit", "most used of it, by window", "admitted, refused, 503", "wait P50, P99, max, ms"
    )
    for name, key in report.keys.items():
        parts = ", ".join(f"{used / key.limit:.3f}" for used in key.used)
        waits = ", ".join(figure(1000 * _quantile(key.waits_s, part)) for part in (0.5, 0.99, 1.0))
        table.add_row(name, figure(key.limit), parts, ", ".join(map(str, key.outcomes.values())), waits)
    title = f"{report.ingresses} ingresses, {report.rate:g} requests/s, {report.kills} of them and {report.redis_kills}"
    show(f"{title} Redis killed", table)


def main(
    *,
    ingresses: Annotated[int, typer.Option(help="Processes that share the limits.")] = 4,
    rate: Annotated[float, typer.Option(help="Requests per second, of all keys.")] = 500.0,
    minutes: Annotated[int, typer.Option(help="Whole windows of a minute.")] = 3,
    kill_every_s: Annotated[float, typer.Option(help="Seconds between deaths of an ingress; 0 for none.")] = 10.0,
    redis_kills: Annotated[int, typer.Option(help="Deaths of Redis.")] = 2,
    as_json: JsonOption = False,
) -> None:
    print_report(measure(ingresses, rate, minutes, kill_every_s, redis_kills), as_json, show_report)


if __name__ == "__main__":
    run(main)
