"""What `manta replay --set` and `manta tune` predict from a tape, against clusters that really have these options.

python -m benchmarks.what_if run FOLDER [NAME ...]   # starts each cluster in turn, and keeps tapes
python -m benchmarks.what_if tune FOLDER             # searches options for each load, from the tapes of `as it is`
python -m benchmarks.what_if table FOLDER            # predicted, real, error

Real figures are read from the tape of the cluster with the change, as those that are predicted: seconds count from the
arrival at the engine. What clients see beside, HTTP included, is in the files.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer

from benchmarks.simulator.traffic import grouped_trace
from cluster.cli.bench.openai_client import OpenAIClient, Outcome
from cluster.cli.bench.prompts import trace_prompts
from cluster.cli.bench.serve import send_all
from cluster.cli.tape.fetch import fetch
from cluster.simulator.cluster import simulate
from cluster.simulator.recorded.recording import Recording
from cluster.simulator.recorded.what_if import Baseline, Figures, recorded_figures, simulated_figures
from cluster.simulator.spec import GoodputSlo
from cluster.simulator.trace import Trace, lognormal, make_trace
from cluster.simulator.tuning.search import Tuner, make_grid
from cluster.simulator.tuning.settings import SETTINGS, with_settings
from engine.core.tape.file import read_tapes
from tests.serve.serve_run import ServeRun, wait_until

SECONDS = 28.0  # of each load
VOCABULARY = 4000
START_S = 120.0
REQUEST_S = 60.0
ENGINE = {"num_threads": 1, "num_blocks": 512, "block_size": 16, "max_num_batched_tokens": 512, "max_num_seqs": 64,
          "dtype": "bfloat16", "tape_mib": 8}  # fmt: skip
AS_IT_IS, AGAIN = "as it is", "again"
CHANGES: dict[str, dict[str, Any]] = {
    AS_IT_IS: {},
    "batch size": {"max_num_seqs": 4},
    "chunk budget": {"max_num_batched_tokens": 64},
    "one replica": {"decode.num_replicas": 1},
    "router": {"routing.policy": "round_robin"},
    "P/D": {"decode.num_replicas": 1, "prefill.num_replicas": 1, "handoff.policy": "always"},
    AGAIN: {},  # what two equal runs differ by
}
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


def load(name: str) -> Trace:
    rate, draw = LOADS[name]
    return draw(rate, 1 + list(LOADS).index(name))


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
    server = ServeRun(own, {"models": [section]}, manta=True)
    try:
        ready = {"replica ready": decode + prefill} | ({"fits this decode engine": decode} if prefill else {})
        wait_until(
            lambda: all(sum(part in line for line in server.log) >= count for part, count in ready.items()), START_S
        )
        wait_until(lambda: httpx.get(f"{server.url}/health", timeout=30).status_code == 200, START_S)
        asyncio.run(send(server.url, warm_up(), seed=99, at_once=True))
        for one in loads:
            since = time.time()
            outcomes = asyncio.run(send(server.url, load(one), seed=list(LOADS).index(one)))
            until = time.time()
            (folder / f"{name}, {one}.tape").write_bytes(fetch(server.url, None))
            told = {"since": since, "until": until, **client_figures(outcomes)}
            (folder / f"{name}, {one}.json").write_text(json.dumps(told, indent=1) + "\n")
            print(f"{name}, {one}: {told}", flush=True)
    finally:
        server.stop()


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


def warm_up() -> Trace:
    return lengths_of((100, 200, 500), (10, 20, 50))(1.0, 0)


async def send(url: str, trace: Trace, seed: int, *, at_once: bool = False) -> list[Outcome]:
    """Stream at the times of the trace, however slow the answers are."""
    bodies = [
        json.dumps({"model": "pocket", "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True,
                    "stream": True, "stream_options": {"include_usage": True}}).encode()
        for prompt, output in zip(trace_prompts(trace, VOCABULARY, seed), trace.output_tokens.tolist(), strict=True)
    ]  # fmt: skip
    times = [0.0] * len(trace) if at_once else trace.arrivals_s.tolist()
    async with OpenAIClient(url, None, REQUEST_S) as client:

        async def one(body: bytes) -> Outcome:
            return await client.send("/v1/completions", body)

        outcomes = await send_all(one, bodies, times, None)
    if errors := [outcome.error for outcome in outcomes if outcome.error]:
        print(f"{len(errors)} of {len(outcomes)} failed: {errors[0]}", flush=True)
    return outcomes


def client_figures(outcomes: list[Outcome]) -> dict[str, Any]:
    done = [outcome for outcome in outcomes if outcome.error is None]
    tpot = [outcome.tpot_s for outcome in done if outcome.tpot_s is not None]
    found = {"requests": len(outcomes), "failed": len(outcomes) - len(done)}
    for name, seconds in (("ttft", [outcome.ttft_s for outcome in done]), ("tpot", tpot)):
        found |= {f"client_{name}_p{p}_ms": round(1000 * float(np.percentile(seconds, p)), 2) for p in (50, 99)}
    return found


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
        rate, fit = LOADS[one][0], start.recording.fit
        print(f"\n{one}, {rate:g} requests/s, {len(start.trace)} requests; {fit.steps} steps, error {fit.error:.0%}, ")
        print(f"contention {fit.contention:.2f}; predicted / real / error")
        print("| change | " + " | ".join(SHOWN) + " |\n| --- |" + " --- |" * len(SHOWN))
        for name, changes in CHANGES.items():
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
