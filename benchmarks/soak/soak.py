"""One soak: a server, its visitors, a kill every so often, and what it holds before and afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx

from benchmarks.soak.bills import Bills, bills
from benchmarks.soak.footprint import TIERS, Footprint, Footprints
from benchmarks.soak.visitors import ADAPTER, FREE, LIMITED, MODEL, Visitors, Visits
from deployments.frontend.api_keys import key_line
from engine import pocket
from tests.serve.serve_run import ServeRun

STARTUP_S, WHOLE_S, IDLE_S = 900.0, 600.0, 120.0
LOOK_S = 5.0  # between two looks at all processes
SETTLE_S = 20.0  # after the last request, before a look that counts
ENGINE = {
    "device": "cpu", "num_threads": 1, "num_gpu_blocks_override": 2048, "max_num_seqs": 32, "determinism": "strict",
    "kv_offloading_size": 0.02, "kv_offloading_disk_size": 0.1, "max_loras": 2,
}  # fmt: skip
PIRATE = Path(pocket.__file__).with_name("pirate")
RPM_LIMIT, TPM_LIMIT = 6, 1200
UPDATE = "an update of the configuration"
VICTIMS = [  # in turns; what is no process is done instead
    "rank1 of decode-pocket", "ingress", "prefill-pocket", "haproxy", "decode-pocket", UPDATE,
    "rank0 of prefill-pocket", "ray::ServeController", "rank0 of decode-pocket",
]  # fmt: skip
SWITCHING_VICTIMS = ["rank0 of pd-pocket", "ingress", "haproxy", "pd-pocket", UPDATE, "ray::ServeController"]
"""The same of replicas that change roles."""
BREAKING = ("ingress", "haproxy")  # a connection ends with these, and its client has to ask again
MAX_MORE_DESCRIPTORS, MAX_MORE_THREADS = 16, 8  # of a process
MAX_MORE_MIB, MAX_MORE_RSS = 32.0, 1.15  # of a process: so many, or so many times what it was, whichever is more
OPEN_LOGS = 200  # files that Ray's log monitor keeps open before it closes those of dead processes
FREE_KINDS = ("ray::IDLE", "python3", "manta-haproxy")
"""Kinds that come and go: workers that Ray starts ahead and ends, programs that have not yet got their names."""


def arguments(folder: Path, switch_roles: bool = False) -> dict[str, Any]:
    """Return the configuration: both pools twice, so that of each kind one lives from beginning to end; strict, so that
    texts do not depend on whether one rank has computed a prompt, or two have. switch_roles: whether replicas change
    between the pools, all of one rank then."""
    tiers = {"kv_offloading_dir": f"{folder}/{TIERS}"}
    pool = {"num_cpus": 0.05, "num_replicas": 2, "stall_timeout_s": 60.0}
    model = {
        "name": MODEL,
        "model": "pocket",
        "engine": ENGINE | tiers,
        "lora_modules": {ADAPTER: str(PIRATE)},
        "prefill": pool,
        "decode": pool if switch_roles else {**pool, "engine": {"tensor_parallel_size": 2}},
        "handoff": {"transport": "tcp", "policy": "always", "switch_roles": switch_roles},
    }
    kept = {"store": f"sqlite://{folder}/store.db", "idempotency_ttl_s": 60.0, "response_ttl_s": 60.0}
    keys = {
        "api_keys": [key_line(name, f"sk-{name}") for name in (FREE, LIMITED)],
        "admin_keys": [FREE],  # whose scrapes have the books of each key
        "key_limits": {LIMITED: {"rpm_limit": RPM_LIMIT, "tpm_limit": TPM_LIMIT}},
    }
    return {"models": [model], "ingress": {"num_replicas": 2, **kept, **keys}}


@dataclass(slots=True)
class Soak:
    """before, after: at rest; so are bills. samples: while it ran. kills: by kind."""

    before: Footprint
    after: Footprint
    bills: tuple[Bills, Bills]
    held: float
    visits: Visits
    kills: Counter[str]
    samples: list[Footprint]
    load: list[float] = field(default_factory=list)  #: of the machine over a minute, at each sample
    seconds: float = 0.0

    def problems(self) -> list[str]:
        """Return what has grown, and what a client could not help."""
        found = list(self.visits.wrong)
        for struck, errors in self.visits.broken.items():
            if struck not in BREAKING:
                found += [f"a request broke after {struck}: {error}" for error in errors]
        found += [f"{kind} lives on outside" for kind in self.after.strays]
        found += self.bills[1].problems(self.bills[0])
        if self.held:
            found.append(f"{self.held:g} blocks or requests are held for nobody")
        for name in ("files", "shared_memory"):
            before, after = getattr(self.before, name), getattr(self.after, name)
            if len(after) > len(before):
                found.append(f"{name}: {len(before)}, at the end {len(after)}: {', '.join(sorted(after - before))}")
        counts = self.before.counts()
        for kind, count in self.after.counts().items():
            if kind in FREE_KINDS:
                continue
            if count > counts.get(kind, 0):
                found.append(f"processes {kind}: {counts.get(kind, 0)}, at the end {count}")
            else:
                found += self._grown(kind)
        return found

    def _grown(self, kind: str) -> list[str]:
        before, after = self.before.of(kind), self.after.of(kind)
        rss = max(one.rss_mib for one in before)
        more_descriptors = OPEN_LOGS if kind == "log_monitor" else MAX_MORE_DESCRIPTORS
        limits = {
            "rss_mib": max(rss + MAX_MORE_MIB, rss * MAX_MORE_RSS),
            "descriptors": max(one.descriptors for one in before) + more_descriptors,
            "threads": max(one.threads for one in before) + MAX_MORE_THREADS,
        }
        return [
            f"{kind}: {name} {max(getattr(one, name) for one in before):.0f}, at the end {value:.0f}"
            for name, limit in limits.items()
            if (value := max(getattr(one, name) for one in after)) > limit
        ]

    def mib_per_hour(self, kind: str) -> float | None:
        """Return how fast the memory of the process that lived longest grew in the second half; None if it is younger,
        or the time too short."""
        pids, later = self.after.pids(kind), self.samples[len(self.samples) // 2 :]
        if not pids or not later or pids[-1] not in later[0].processes:
            return None
        pairs = [(one.at / 3600, one.processes[pids[-1]].rss_mib) for one in later if pids[-1] in one.processes]
        if len(pairs) < 10:
            return None
        return statistics.linear_regression(*zip(*pairs, strict=True)).slope


async def soak(
    folder: Path, seconds: float, warm_up_s: float, kill_s: float, clients: int, switch_roles: bool = False
) -> Soak:
    """Return what a server holds at rest after `warm_up_s` of requests, and again after `seconds` of them in which
    every `kill_s` a process is killed, or the configuration changes. folder: a short path, for all files.
    switch_roles: as for `arguments`."""
    environment = {"RAY_TMPDIR": str(folder), "TMPDIR": str(folder)}
    given, kinds = arguments(folder, switch_roles), SWITCHING_VICTIMS if switch_roles else VICTIMS
    with ServeRun(folder, given, environment=environment, manta=True) as server:
        for _ in range(4):
            await asyncio.to_thread(server.wait_for_line, "replica ready", STARTUP_S)
        return await _soak(server, given, kinds, Footprints(server, folder), seconds, warm_up_s, kill_s, clients)


async def _soak(
    server: ServeRun,
    given: dict[str, Any],
    kinds: list[str],
    footprints: Footprints,
    seconds: float,
    warm_up_s: float,
    kill_s: float,
    clients: int,
) -> Soak:
    counts: dict[str, int] = {}
    await _whole(footprints, counts)
    counts |= {kind: len(footprints.look().pids(kind)) for kind in kinds}
    visits, kills, last = Visits(), Counter[str](), ["nothing"]
    visitors = Visitors(server.url, clients, visits, lambda: last[0])
    async with visitors:
        await asyncio.to_thread(server.put, given)  # Ray's dashboard grows by its first request of this kind
        await asyncio.sleep(warm_up_s)
        await visitors.read_all()
    await _at_rest(footprints)
    billed = await bills(server.url)
    before = await asyncio.to_thread(footprints.look)
    found = Soak(before, before, (billed, billed), 0.0, visits, kills, [])
    started = time.monotonic()
    async with Visitors(server.url, clients, visits, lambda: last[0]), _looking(footprints, found):
        victims = cycle(kinds)
        while (left := started + seconds - time.monotonic()) > 0:
            await _until(lambda: footprints.engines() >= 1, WHOLE_S)  # else what breaks is the fault of an earlier one
            last[0] = await _strike(footprints, victims, counts)
            kills[last[0]] += 1
            if last[0] == UPDATE:
                limit = given["ingress"]["key_limits"][LIMITED]
                limit["rpm_limit"] = RPM_LIMIT + kills[UPDATE] % 2
                await asyncio.to_thread(server.put, given)
            minute = (time.monotonic() - started) / 60
            print(f"minute {minute:.1f}: {last[0]}, {visits.answered.total()} answered so far", file=sys.stderr)
            await asyncio.sleep(min(kill_s, left))
        await _whole(footprints, counts)
    found.seconds = time.monotonic() - started
    await _at_rest(footprints)
    found.after, found.held = await asyncio.to_thread(footprints.look), footprints.held()
    found.bills = billed, await bills(server.url)
    return found


async def _strike(footprints: Footprints, victims: cycle[str], counts: dict[str, int]) -> str:
    """Kill the youngest of the next kind that is whole, and return the kind. UPDATE has none, and its turn comes."""
    now = await asyncio.to_thread(footprints.look)
    for kind, _ in zip(victims, counts, strict=False):
        pids = now.pids(kind)
        if len(pids) == counts[kind]:
            if pids:
                os.kill(pids[0], signal.SIGKILL)
            return kind
    return "nothing"


@asynccontextmanager
async def _looking(footprints: Footprints, found: Soak) -> AsyncGenerator[None]:
    async def look() -> None:
        while True:
            found.samples.append(await asyncio.to_thread(footprints.look))
            found.load.append(os.getloadavg()[0])
            await asyncio.sleep(LOOK_S)

    task = asyncio.create_task(look())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _whole(footprints: Footprints, counts: dict[str, int]) -> None:
    """Wait until there are as many processes as there should be, and an ingress could ask a decode replica."""

    def whole() -> bool:
        now = footprints.look()
        return all(len(now.pids(kind)) == n for kind, n in counts.items()) and footprints.engines() >= 1

    await _until(whole, WHOLE_S)


async def _at_rest(footprints: Footprints) -> None:
    await _until(lambda: footprints.held() == 0, IDLE_S)
    await asyncio.sleep(SETTLE_S)


async def _until(condition: Any, limit_s: float) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(limit_s):
        while True:
            try:
                if await asyncio.to_thread(condition):
                    return
            except (httpx.HTTPError, AssertionError):  # there is no ingress, or no proxy
                pass
            await asyncio.sleep(1.0)
