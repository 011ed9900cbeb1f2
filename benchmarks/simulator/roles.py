"""A load that turns from prompts to answers and back, on pools of a fixed size, with roles that change, and with pools
that scale from zero: on a real cluster, and in the simulator.

python -m benchmarks.simulator.roles --fit fit.json            # one prefill and two decode replicas; writes the fit
python -m benchmarks.simulator.roles --fit fit.json "2P + 1D" "roles change" "from zero"

The rates follow from the cost of steps, which is fitted to a client's times before the first run. In each phase, one
replica of the busier pool has more to do than it can, and two have less (`load`).
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
import numpy as np
import typer

from benchmarks.command import run
from benchmarks.simulator.cluster import TOKENIZER, VOCABULARY
from benchmarks.simulator.http_calibration import HttpFit, completion, fit_observations, observe
from benchmarks.simulator.slow_calls import SlowCalls
from cluster.autoscaling.slo import Limits
from cluster.cli.bench.openai_client import OpenAIClient
from cluster.cli.bench.prompts import FIRST_ID
from cluster.cli.bench.serve import send_all
from cluster.lab.simulator.spec import ClusterSpec, GoodputSlo
from cluster.lab.simulator.trace import Trace
from engine import pocket
from engine.config import EngineConfig
from tests.models import make_model
from tests.scrape import Scrape
from tests.serve.serve_run import ServeRun, wait_until

SLOTS, PHASE_S = 8, 25.0
PROMPT, ANSWER = (600, 4), (24, 150)  # tokens in and out of a request of each kind
PHASES = (PROMPT, ANSWER, PROMPT)
SLO = GoodputSlo(ttft_s=2.0, tpot_s=0.1)
UPSCALE_S, DOWNSCALE_S, IDLE_S = 0.5, 20.0, 10.0
SIZES: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 10,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 4096,
    "max_position_embeddings": 2048}  # fmt: skip
KV_BYTES = 2 * 10 * 4 * 64 * 2.0
ENGINE = {
    "num_threads": 1,
    "num_gpu_blocks_override": 1024,
    "block_size": 16,
    "max_num_batched_tokens": 512,
    "max_num_seqs": SLOTS,
}
CONFIG = EngineConfig(**ENGINE, async_scheduling=False, max_waiting=10**9)  # type: ignore[arg-type]
START_S, STARTUP_S = 180.0, 12.0


@dataclass(frozen=True, slots=True)
class RolePools:
    """prefill, decode: replicas at the start. most: of each pool; None for a fixed number."""

    prefill: int
    decode: int
    switch: bool = False
    most: int | None = None

    def section(self, model: str) -> dict[str, Any]:
        pool: dict[str, Any] = {"num_cpus": 0.2}
        if self.most is not None:
            pool |= {"max_replicas": self.most, "upscale_delay_s": UPSCALE_S, "downscale_delay_s": DOWNSCALE_S}
        least: list[dict[str, Any]] = [{"min_replicas": 0, "scale_to_zero_delay_s": IDLE_S}, {"min_replicas": 1}]
        sizes = least if self.most else [{"num_replicas": self.prefill}, {"num_replicas": self.decode}]
        return {
            "name": "m",
            "model": model,
            "engine": {**ENGINE, "dtype": "bfloat16"},
            "prefill": pool | sizes[0],
            "decode": pool | sizes[1],
            "handoff": {"policy": "always", "transport": "tcp", "switch_roles": self.switch},
            "slo": {"ttft_ms": 1000 * SLO.ttft_s, "itl_ms": 1000 * SLO.tpot_s},
        }


LAYOUTS = {
    "1P + 2D": RolePools(1, 2),
    "2P + 1D": RolePools(2, 1),
    "roles change": RolePools(1, 2, switch=True),
    "from zero": RolePools(0, 1, most=2),
}


def load(found: HttpFit) -> float:
    """Return the work of each phase as a multiple of what one replica can do: halfway between one replica and two that
    slow each other."""
    return (1 + 2 / (1 + found.contention)) / 2


def turning(found: HttpFit) -> Trace:
    cost, work = found.cost, load(found)
    prompt_s = sum(cost.seconds(n, 1, n * (at + n / 2), at + n) for at, n in chunks(PROMPT[0]))
    step_s = cost.seconds(SLOTS, SLOTS, SLOTS * 100, SLOTS * 100)
    rates = {PROMPT: work / prompt_s, ANSWER: work * SLOTS / (ANSWER[1] * step_s)}
    arrivals, sizes = [], []
    for number, kind in enumerate(PHASES):
        count = int(rates[kind] * PHASE_S)
        arrivals += [number * PHASE_S + i / rates[kind] for i in range(count)]
        sizes += [kind] * count
    prompts, outputs = np.array(sizes).T
    return Trace("turning", np.array(arrivals), prompts, outputs)


def chunks(prompt: int) -> Iterator[tuple[int, int]]:
    for at in range(0, prompt, CONFIG.max_num_batched_tokens):
        yield at, min(prompt - at, CONFIG.max_num_batched_tokens)


def shares(trace: Trace, ttft_s: np.ndarray, tpot_s: np.ndarray) -> list[float]:
    """Per cent of the requests within both targets: of each phase, and of all."""
    good = (ttft_s <= SLO.ttft_s) & ~(tpot_s > SLO.tpot_s)
    phase = (trace.arrivals_s // PHASE_S).astype(int)
    return [100 * float(good[phase == n].mean()) for n in range(len(PHASES))] + [100 * float(good.mean())]


# -- real --------------------------------------------------------------------------------------------------


@contextmanager
def serving(layout: RolePools, model: str) -> Iterator[ServeRun]:
    with (
        tempfile.TemporaryDirectory() as folder,
        ServeRun(Path(folder), {"models": [layout.section(model)]}, manta=True) as server,
    ):
        wait_until(lambda: is_up(server, layout), START_S)
        yield server


def is_up(server: ServeRun, layout: RolePools) -> bool:
    try:
        metrics = Scrape(httpx.get(f"{server.url}/metrics", timeout=30).raise_for_status().text)
    except httpx.HTTPError:
        return False
    computing = metrics.select("manta_engine_role", [("role", "=", "prefill")])
    if layout.switch and sum(one.value for one in computing) != layout.prefill:
        return False
    up = {sample.labels["engine"] for sample in metrics.select("vllm:num_requests_running", [])}
    decode = sum(one.value for one in metrics.select("manta_up", []))
    return decode == layout.decode and len(up) == layout.prefill + layout.decode


async def calibrate(server: ServeRun, layout: RolePools) -> HttpFit:
    async with OpenAIClient(server.url, None, timeout_s=60) as client:
        await observe(client, "m", layout.decode, CONFIG.max_num_batched_tokens, apart=True, rounds=1)
        found = await observe(client, "m", layout.decode, CONFIG.max_num_batched_tokens, apart=True, rounds=2)
    return fit_observations(found)


async def replay(server: ServeRun, trace: Trace) -> list[float]:
    rng = np.random.default_rng(3)
    bodies = [
        completion("m", rng.integers(FIRST_ID, VOCABULARY, int(prompt)).tolist(), int(output))
        for prompt, output in zip(trace.prompt_tokens, trace.output_tokens, strict=True)
    ]
    async with OpenAIClient(server.url, None, timeout_s=120) as client:
        outcomes = await send_all(partial(client.send, "/v1/completions"), bodies, trace.arrivals_s.tolist(), None)
    failed = [outcome.error for outcome in outcomes if outcome.error]
    assert not failed, f"{len(failed)} failed: {failed[0]}"
    tpot_s = [np.nan if outcome.tpot_s is None else outcome.tpot_s for outcome in outcomes]
    return shares(trace, np.array([outcome.ttft_s for outcome in outcomes]), np.array(tpot_s))


# -- simulated ---------------------------------------------------------------------------------------------


def simulate(layout: RolePools, found: HttpFit, trace: Trace) -> list[float]:
    """The simulator's pools never scale to zero: the prefill pool keeps one replica."""
    total = layout.prefill + layout.decode
    limits = Limits(
        min_replicas=1,
        max_replicas=total if layout.switch else layout.most or 1,
        max_num_seqs=SLOTS,
        upscale_delay_s=UPSCALE_S,
        downscale_delay_s=DOWNSCALE_S,
        scale_to_zero_delay_s=float("inf"),
    )
    spec = ClusterSpec(
        replicas=layout.decode,
        prefill_replicas=max(1, layout.prefill),
        engine=CONFIG,
        cost=found.cost,
        contention=found.contention,
        num_blocks=ENGINE["num_gpu_blocks_override"],
        kv_bytes=KV_BYTES,
        router="prefix_aware",
        max_model_len=SIZES["max_position_embeddings"],
        call_s=found.request_s / 4,
        token_s=found.request_s / 4,
        handoff_s=found.request_s / 4,
        slo=SLO,
        limits=limits if layout.switch or layout.most else None,
        switch_roles=layout.switch,
        startup_s=STARTUP_S,
    )
    cluster = SlowCalls(spec, trace, busy_s=found.busy_s)
    cluster.run()
    results = cluster.results
    tpot_s = (results.last_at - results.first_at) / (trace.output_tokens - 1)
    return shares(trace, results.first_at - trace.arrivals_s, tpot_s)


# -- both --------------------------------------------------------------------------------------------------


def main(
    fit: Annotated[Path, typer.Option(dir_okay=False, help="File of the fit; written if there is none.")],
    layouts: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(LAYOUTS)}.")] = None,
    simulated_only: Annotated[bool, typer.Option("--simulated-only", help="Start no cluster; needs the fit.")] = False,
) -> None:
    """Print the share of requests within both targets, of each phase and of all: real and simulated."""
    found = msgspec.json.decode(fit.read_bytes(), type=HttpFit) if fit.is_file() else None
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), "qwen3", **SIZES)
        for file in TOKENIZER:
            shutil.copy(pocket.PATH / file, model)
        for name in layouts or ["1P + 2D"]:
            real: list[float] | None = None
            if not simulated_only:
                with serving(LAYOUTS[name], str(model)) as server:
                    if found is None:
                        found = asyncio.run(calibrate(server, LAYOUTS[name]))
                        fit.write_text(json.dumps(asdict(found)) + "\n", encoding="utf-8")
                        print(found, flush=True)
                    trace = turning(found)
                    real = asyncio.run(replay(server, trace))
            assert found is not None, "--simulated-only needs a fit"
            simulated = simulate(LAYOUTS[name], found, turning(found))
            for what, values in (("real", real), ("simulated", simulated)):
                if values is not None:
                    print(f"| {name} | {what} | " + " | ".join(f"{value:.0f}" for value in values) + " |", flush=True)


if __name__ == "__main__":
    run(main)
