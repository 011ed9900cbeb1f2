"""What `manta replay --set` and `manta tune` predict from a tape, against clusters that really have these options.

python -m benchmarks.what_if run FOLDER [NAME ...]   # starts each cluster in turn, and keeps tapes
python -m benchmarks.what_if engines FOLDER          # the same with engines of this process, apart from each other
python -m benchmarks.what_if tune FOLDER             # searches options for each load, from the tapes of `as it is`
python -m benchmarks.what_if table FOLDER            # predicted, real, error

Real figures are read from the tape of the cluster with the change, as those that are predicted: seconds count from the
arrival at the engine. What clients see beside, HTTP included, is in the files. `engines` counts the CPU time of each
engine, and jumps over idle times, so that other programs do not matter; there is no HTTP, and engines take turns.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import psutil
import typer

from benchmarks.simulator.traffic import grouped_trace
from cluster.cli.bench.openai_client import OpenAIClient, RequestResult, fetch
from cluster.cli.bench.prompts import trace_prompts
from cluster.cli.bench.serve import send_all
from cluster.lab.recorded.recording import Recording
from cluster.lab.recorded.what_if import Baseline, Figures, recorded_figures, simulated_figures
from cluster.lab.simulator.cluster import simulate
from cluster.lab.simulator.spec import GoodputSlo
from cluster.lab.simulator.trace import Trace, lognormal, make_trace
from cluster.lab.simulator.tuning.search import Tuner, make_grid
from cluster.lab.simulator.tuning.settings import SETTINGS, with_settings
from engine import pocket
from engine.assembly.build import build_engine
from engine.clock import Clock
from engine.config import EngineConfig
from engine.parts.tape.engine_tape import tape_with_key
from engine.parts.tape.file import pack_tapes, read_tapes
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from tests.serve.serve_run import ServeRun, wait_until

SECONDS = 24.0  # of each load
VOCABULARY = 4000
START_S = 120.0
REQUEST_S = 60.0
ENGINE = {"num_threads": 1, "num_gpu_blocks_override": 512, "block_size": 16, "max_num_batched_tokens": 512,
          "max_num_seqs": 64,
          "dtype": "bfloat16", "tape_mib": 8}  # fmt: skip
AS_IT_IS, AGAIN = "as it is", "again"
CHANGES: dict[str, dict[str, Any]] = {
    AS_IT_IS: {},
    "batch size": {"max_num_seqs": 4},
    "chunk budget": {"max_num_batched_tokens": 64},
    "one replica": {"decode.num_replicas": 1},
    "router": {"routing.policy": "round_robin"},
    "two pools": {"decode.num_replicas": 1, "prefill.num_replicas": 1, "handoff.policy": "always"},
    AGAIN: {},  # what two equal runs differ by
}
OF_ENGINES: dict[str, dict[str, Any]] = {
    AS_IT_IS: {"decode.num_replicas": 1},
    "batch size": {"max_num_seqs": 4},
    "chunk budget": {"max_num_batched_tokens": 64},
    "two replicas": {"decode.num_replicas": 2, "routing.policy": "round_robin"},
    "no prefix caching": {"enable_prefix_caching": False},
    AGAIN: {"decode.num_replicas": 1},
}
SHARE = 0.6  # of the requests of two replicas that one engine gets
SHOWN = {"output_tokens_per_s": 1.0, "ttft_p50_s": 1e3, "ttft_p99_s": 1e3, "tpot_p50_s": 1e3, "tpot_p99_s": 1e3}
GOOD_PERCENTILE = 70  # of both latencies as it is: the targets of `tune`

command = typer.Typer(add_completion=False)
FolderArgument = Annotated[Path, typer.Argument(help="For tapes and figures.")]


# -- loads -------------------------------------------------------------------------------------------------


def lengths_of(prompt: tuple[float, float, int], output: tuple[float, float, int]) -> Callable[[float, int], Trace]:
    """prompt, output: tokens: median, mean, maximum."""

    def draw(rate: float, seed: int) -> Trace:
        count, rng = round(rate * SECONDS), np.random.default_rng(seed)
        arrivals = make_trace("fixed", count, rate, seed=seed).arrivals_s
        return Trace("drawn", arrivals, lognormal(rng, count, *prompt), lognormal(rng, count, *output))

    return draw


LOADS: dict[str, tuple[float, Callable[[float, int], Trace]]] = {  # requests per second
    "chats": (14.0, lambda rate, seed: grouped_trace(round(rate * SECONDS), rate, seed, groups=16)),
    "long prompts": (9.0, lengths_of((600, 700, 1500), (12, 16, 100))),
    "long answers": (6.0, lengths_of((50, 60, 300), (120, 150, 400))),
}


def load(name: str, share: float = 1.0) -> Trace:
    rate, draw = LOADS[name]
    return draw(share * rate, 1 + list(LOADS).index(name))


# -- real --------------------------------------------------------------------------------------------------


@command.command()
def run(folder: FolderArgument, names: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Run clusters with the named changes, each under all loads; those that `tune` has found, under theirs."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or CHANGES:
        tuned = folder / f"{name}.changes.json"
        changes = json.loads(tuned.read_text()) if tuned.exists() else CHANGES[name]
        loads = [name.removeprefix("tuned ")] if tuned.exists() else list(LOADS)
        serve_all(folder, name, changes, loads)


def serve_all(folder: Path, name: str, changes: dict[str, Any], loads: list[str]) -> None:
    section = section_of(changes)
    decode, prefill = section["decode"]["num_replicas"], section.get("prefill", {}).get("num_replicas", 0)
    own = folder / f"server {name}"
    own.mkdir(exist_ok=True)
    with ServeRun(own, {"models": [section]}, manta=True) as server:
        ready = {"replica ready": decode + prefill} | ({"fits this decode engine": decode} if prefill else {})
        wait_until(
            lambda: all(sum(part in line for line in server.log) >= count for part, count in ready.items()), START_S
        )
        wait_until(lambda: httpx.get(f"{server.url}/health", timeout=30).status_code == 200, START_S)
        asyncio.run(send(server.url, warm_up(), seed=99, at_once=True))
        for one in loads:
            since, before = time.time(), cpu_seconds(server)
            outcomes = asyncio.run(send(server.url, load(one), seed=list(LOADS).index(one)))
            until, after = time.time(), cpu_seconds(server)
            (folder / f"{name}, {one}.tape").write_bytes(fetch(server.url, "/debug/tape", None))
            others = (after[0] - before[0] - after[1] + before[1]) / (until - since)
            told = {"since": since, "until": until, "cores_of_others": round(others, 2), **client_figures(outcomes)}
            (folder / f"{name}, {one}.json").write_text(json.dumps(told, indent=1) + "\n")
            print(f"{name}, {one}: {told}", flush=True)


def section_of(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the model's section of serve_config.yaml."""
    section: dict[str, Any] = {
        "name": "pocket",
        "model": "pocket",
        "engine": dict(ENGINE),
        "decode": {"num_replicas": 2, "num_cpus": 0.25},
    }
    if changes.get("prefill.num_replicas"):
        section |= {"prefill": {"num_cpus": 0.25}, "handoff": {"policy": "auto"}}
    for name, value in changes.items():
        *sections, key = SETTINGS[name].path.split(".")
        if sections[0] in section:
            at = section
            for part in sections:
                at = at.setdefault(part, {})
            at[key] = value
    return section


def cpu_seconds(server: ServeRun) -> tuple[float, float]:
    """Return the CPU seconds of all programs of the machine, and of them those of the server and this process."""
    whole, own = psutil.cpu_times(), [psutil.Process().cpu_times()]
    for process in server.processes():
        with suppress(psutil.NoSuchProcess):
            own.append(process.cpu_times())
    return sum(whole) - whole.idle - whole.iowait, sum(times.user + times.system for times in own)


def warm_up() -> Trace:
    return lengths_of((100, 200, 500), (10, 20, 50))(1.0, 0)


async def send(url: str, trace: Trace, seed: int, *, at_once: bool = False) -> list[RequestResult]:
    """Stream at the times of the trace, however slow the answers are."""
    bodies = [
        json.dumps({"model": "pocket", "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True,
                    "stream": True, "stream_options": {"include_usage": True}}).encode()
        for prompt, output in zip(trace_prompts(trace, VOCABULARY, seed), trace.output_tokens.tolist(), strict=True)
    ]  # fmt: skip
    times = [0.0] * len(trace) if at_once else trace.arrivals_s.tolist()
    async with OpenAIClient(url, None, REQUEST_S) as client:

        async def one(body: bytes) -> RequestResult:
            return await client.send("/v1/completions", body)

        outcomes = await send_all(one, bodies, times, None)
    if errors := [outcome.error for outcome in outcomes if outcome.error]:
        print(f"{len(errors)} of {len(outcomes)} failed: {errors[0]}", flush=True)
    return outcomes


def client_figures(outcomes: list[RequestResult]) -> dict[str, Any]:
    done = [outcome for outcome in outcomes if outcome.error is None]
    tpot = [outcome.tpot_s for outcome in done if outcome.tpot_s is not None]
    found: dict[str, Any] = {"requests": len(outcomes), "failed": len(outcomes) - len(done)}
    for name, seconds in (("ttft", [outcome.ttft_s for outcome in done]), ("tpot", tpot)):
        found |= {f"client_{name}_p{p}_ms": round(1000 * float(np.percentile(seconds, p)), 2) for p in (50, 99)}
    return found


# -- engines without a cluster -----------------------------------------------------------------------------


class OwnEngine:
    """A real engine on a clock of its own, which moves by the CPU time of its steps."""

    def __init__(self, name: str, changes: dict[str, Any]):
        own = {key: value for key, value in changes.items() if SETTINGS[key].of_engine}
        self._before = self._started = 0.0
        clock = Clock(self.now, self.now)
        self.core = build_engine(EngineConfig(model=str(pocket.PATH), **{**ENGINE, **own}), engine_id=name, clock=clock)

    def now(self) -> float:
        return self._before + (time.process_time() - self._started if self._started else 0.0)

    def wait_until(self, at: float) -> None:
        self._before = max(self._before, at)

    def run(self, requests: list[tuple[float, GenerateRequest]]) -> None:
        """Answer requests, each from its time on."""
        while requests or self.core.has_work:
            if not self.core.has_work:
                self.wait_until(requests[0][0])
            self._started = time.process_time()
            while requests and requests[0][0] <= self._before:
                self.core.add(requests.pop(0)[1])
            self.core.step()
            self._before, self._started = self.now(), 0.0


def ask(engines: list[OwnEngine], trace: Trace, seed: int, since: float) -> None:
    """Engines take requests in turn. since: when the trace begins, on their clocks."""
    found: list[list[tuple[float, GenerateRequest]]] = [[] for _ in engines]
    for i, prompt in enumerate(trace_prompts(trace, VOCABULARY, seed)):
        params = SamplingParams(max_tokens=int(trace.output_tokens[i]), ignore_eos=True, temperature=0.0)
        request = GenerateRequest(request_id=f"{seed}-{i}", prompt=prompt, params=params)
        found[i % len(engines)].append((since + float(trace.arrivals_s[i]), request))
    for engine, requests in zip(engines, found, strict=True):
        engine.run(requests)


@command.command()
def engines(folder: FolderArgument) -> None:
    """Run engines of this process with each change, under all loads."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, changes in OF_ENGINES.items():
        found = [OwnEngine(f"engine-{i}", changes) for i in range(changes.get("decode.num_replicas", 1))]
        ask(found, warm_up(), 99, 0.0)
        for one in LOADS:
            trace, since = load(one, SHARE), max(engine.now() for engine in found) + 1
            ask(found, trace, list(LOADS).index(one), since)
            tapes = [tape_with_key(engine.core.journal.take(), b"a key of a tape.") for engine in found]
            (folder / f"{name}, {one}.tape").write_bytes(pack_tapes(tapes))
            told = {"since": since, "until": max(engine.now() for engine in found)}
            (folder / f"{name}, {one}.json").write_text(json.dumps(told) + "\n")
            print(f"{name}, {one}: {waits(recording(folder, name, one), trace, since)}", flush=True)
        for engine in found:
            engine.core.close()


def waits(found: Recording, trace: Trace, since: float) -> str:
    """Compare what a tape tells of the time until an engine takes a request with the truth."""
    true = [
        one.request.clock.arrived_at - since - float(trace.arrivals_s[int(one.request.request_id.partition("-")[2])])
        for one in found.requests
    ]
    told = [one.waited_s for one in found.requests]
    return f"requests are taken after {1000 * np.mean(true):.2f} ms; the tape tells {1000 * np.mean(told):.2f} ms"


# -- predicted ---------------------------------------------------------------------------------------------


def recording(folder: Path, name: str, one: str) -> Recording:
    told = json.loads((folder / f"{name}, {one}.json").read_text())
    return Recording(read_tapes(folder / f"{name}, {one}.tape"), since=told["since"], until=told["until"])


def baseline(folder: Path, one: str) -> Baseline:
    found = recording(folder, AS_IT_IS, one)
    ttft = np.percentile([request.ttft_s for request in found.requests], GOOD_PERCENTILE)
    tpot = np.nanpercentile([request.tpot_s for request in found.requests], GOOD_PERCENTILE)
    return Baseline(found, GoodputSlo(ttft_s=float(ttft), tpot_s=float(tpot)))


@command.command()
def tune(folder: FolderArgument) -> None:
    """Search options for each load, and write them where `run` finds them, as `tuned LOAD`."""
    for one in LOADS:
        start = baseline(folder, one)
        grid = make_grid(start.spec, start.spec.gpus)
        tuner = Tuner(start.spec, start.trace, "goodput", start.spec.gpus, grid)
        best, slo = tuner.tune(), start.spec.slo
        (folder / f"tuned {one}.changes.json").write_text(json.dumps(best.changes))
        print(
            f"{one}: targets {1000 * slo.ttft_s:.1f} and {1000 * slo.tpot_s:.2f} ms; {tuner.num_tried} clusters; good: "
            f"recorded {start.recorded.good:.0%}, simulated {start.simulated.good:.0%}, expected "
            f"{best.report.good:.0%} with {best.changes}",
            flush=True,
        )


@command.command()
def table(folder: FolderArgument) -> None:
    """Print what was predicted from the tapes of `as it is`, and what came."""
    goods: dict[str, dict[str, float]] = {}
    for one in LOADS:
        start = baseline(folder, one)
        rate, fit = len(start.trace) / start.trace.duration_s, start.recording.fit
        print(
            f"\n{one}, {rate:.1f} requests/s, {len(start.trace)} requests; {fit.steps} steps, error {fit.error:.0%}, "
        )
        print(f"contention {fit.contention:.2f}, busy {start.recording.busy:.0%}; predicted / real / error")
        print("| change | " + " | ".join(SHOWN) + " |\n| --- |" + " --- |" * len(SHOWN))
        for name, changes in (OF_ENGINES | CHANGES).items():
            if not (folder / f"{name}, {one}.tape").exists():
                continue
            spec = with_settings(start.spec, changes)
            predicted = simulated_figures(simulate(spec, start.trace), spec.slo) if changes else start.simulated
            real = recorded_figures(recording(folder, name, one), spec.slo)
            goods.setdefault(one, {})[name] = real.good
            print(f"| {name} | " + " | ".join(cells(predicted, real)) + " |", flush=True)
        if (folder / f"tuned {one}, {one}.tape").exists():
            real = recorded_figures(recording(folder, f"tuned {one}", one), start.spec.slo)
            goods[one]["tuned"] = real.good
    print("\nrequests within both targets, really, %")
    for one, found in goods.items():
        print(f"{one}: " + ", ".join(f"{name} {100 * good:.1f}" for name, good in found.items()))


def cells(predicted: Figures, real: Figures) -> list[str]:
    found = []
    for name, scale in SHOWN.items():
        expected, came = (scale * asdict(each)[name] for each in (predicted, real))
        found.append(f"{expected:,.1f} / {came:,.1f} / {expected / came - 1:+.0%}")
    return found


if __name__ == "__main__":
    command()
