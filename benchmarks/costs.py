"""Whether a client's bill is what the client costs: `python -m benchmarks.costs`.

Clients A and B share an engine whose queue is never empty, so that each request takes time from all others. The engine
computes the requests of B alone, then those of both. The truth about A is the difference of the time that its steps
take. The bill of A is the sum of what its answers say they have cost. Weights are random: what is computed does not
depend on their values.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import DtypeOption, JsonOption, print_report, run
from benchmarks.small_shape import SHAPE
from cluster.terminal.tables import figure, make_table, show
from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.door.inputs import CacheCleared
from engine.core.engine import EngineCore
from engine.parts.costs.cost_ledger import CostLedger
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.costs import SequenceCost
from engine.wire.sampling_params import SamplingParams

SEQUENCES = 16
VOCAB = SHAPE["vocab_size"]


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one client."""

    requests: int
    prompt: int
    """Tokens of a prompt that no other prompt has."""
    output: int
    shared: int = 0
    """Tokens at the beginning of each prompt, the same for all clients."""


B = Load(64, 64, 32, shared=128)
MIXES = {  # each adds a few seconds: what a machine takes more or less than usual must be little beside that
    "as B": Load(96, 64, 32, shared=128),
    "long prompts, short answers": Load(32, 640, 4),
    "short prompts, long answers": Load(32, 16, 128),
    "many short requests": Load(384, 16, 8),
    "long prompts that B shares": Load(256, 8, 16, shared=128),
}


@dataclass(frozen=True, slots=True)
class CostReport:
    dtype: str
    truth_s: dict[str, list[float]]
    """What A's requests added to the time of all steps, by mix."""
    billed_s: dict[str, list[float]]


def busy_s(core: EngineCore) -> float:
    lines = core.observers[CostLedger].seconds
    return lines["requests"] + lines["preemption"]


def compute(core: EngineCore, loads: dict[str, Load], seed: int) -> tuple[float, dict[str, float]]:
    """Return the seconds of all steps, and the bill of each client."""
    core.apply(CacheCleared())
    before, rng = busy_s(core), random.Random(seed)
    shared = rng.choices(range(3, VOCAB), k=4096)
    requests = [(client, load, i) for client, load in loads.items() for i in range(load.requests)]
    rng.shuffle(requests)
    for client, load, i in requests:
        own = random.Random(f"{seed} {client} {i}").choices(range(3, VOCAB), k=load.prompt)
        params = SamplingParams(temperature=0.0, max_tokens=load.output, ignore_eos=True)
        core.add(GenerateRequest(request_id=f"{client} {i}", prompt=shared[: load.shared] + own, params=params))
    bills = dict.fromkeys(loads, 0.0)
    while core.has_work:
        for event in core.step():
            for cost in event.delta.records(SequenceCost):
                bills[event.request.request_id.partition(" ")[0]] += cost.compute_s
    return busy_s(core) - before, bills


@contextmanager
def small_engine(dtype: str) -> Iterator[EngineCore]:
    with tempfile.TemporaryDirectory() as made:
        Path(made, "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": 10}), encoding="utf-8")
        config = EngineConfig(
            model=made, dtype=dtype, load_format="dummy", max_num_seqs=SEQUENCES, max_model_len=1024,  # type: ignore[arg-type]
            num_gpu_blocks_override=2048
        )  # fmt: skip
        with closing(build_engine(config)) as core:
            yield core


def measure(dtype: str, repetitions: int) -> CostReport:
    truth: dict[str, list[float]] = {name: [] for name in MIXES}
    billed: dict[str, list[float]] = {name: [] for name in MIXES}
    with small_engine(dtype) as core:
        compute(core, {"B": B}, 0)  # warms up
        for seed in range(1, repetitions + 1):
            for name, mix in MIXES.items():
                alone = compute(core, {"B": B}, seed)[0] if seed % 2 else None
                both, bills = compute(core, {"B": B, "A": mix}, seed)
                if alone is None:  # a machine that becomes slower adds to the truth in one turn and not in the next
                    alone, _ = compute(core, {"B": B}, seed)
                truth[name].append(both - alone)
                billed[name].append(bills["A"])
    return CostReport(dtype, truth, billed)


def show_report(report: CostReport) -> None:
    table = make_table("A's requests", "added, s", "billed, s", "billed of added", "in each turn")
    for name, truth in report.truth_s.items():
        billed = report.billed_s[name]
        each = ", ".join(f"{bill / added:.2f}" for bill, added in zip(billed, truth, strict=True))
        whole = sum(billed) / sum(truth)
        table.add_row(name, figure(statistics.mean(truth)), figure(statistics.mean(billed)), f"{whole:.2f}", each)
    show(f"bill of client A beside B, {report.dtype}", table)


def main(
    *,
    dtype: DtypeOption = "bfloat16",
    repetitions: Annotated[int, typer.Option(help="Turns of each mix.")] = 3,
    as_json: JsonOption = False,
) -> None:
    print_report(measure(dtype, repetitions), as_json, show_report)


if __name__ == "__main__":
    run(main)
