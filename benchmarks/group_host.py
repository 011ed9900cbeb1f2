"""Microseconds of the host in a step of several ranks: one rank, four pipeline stages, four engines that share experts.

As in benchmarks/host.py, the devices compute nothing, and what counts is the CPU time of threads of the first rank. The
other ranks are processes on the same cores. With several ranks, steps are launched in a thread of their own.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from torch import Tensor

from benchmarks.command import JsonOption, print_json, run
from benchmarks.host import PARTS, SHAPE, UNMEASURED, idle_device, step
from cluster.terminal.tables import figure, make_table, show
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.distributed.part_group import PartGroup
from engine.model.models.llama import LlamaForCausalLM
from engine.runner.launcher import Launcher
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from tests.rank_pool import RankPool
from tests.shared_engines import running

MIXTURE: dict[str, Any] = {
    **SHAPE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 4,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "4 stages": {"pipeline_parallel_size": 4},
    "4 engines": {"data_parallel_size": 4, "enable_expert_parallel": True},
}
PROMPT = 100
EXCHANGE = "exchange"  # of the numbers of rows, with which engines that share experts begin a step


class IdlePool(RankPool):
    """Ranks that compute nothing."""

    def call(self, rank: int, function: Callable[..., None], *args: Any) -> None:
        super().call(rank, call_idle, function, *args)


def call_idle(function: Callable[..., None], *args: Any) -> None:
    with no_compute():
        function(*args)


@contextmanager
def no_compute() -> Iterator[None]:
    """Let the layers and the head of every model in this process compute nothing."""

    def best(model: LlamaForCausalLM, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden.new_ones(len(hidden)), hidden.new_zeros(len(hidden)).long()

    layers = mock.patch.object(LlamaForCausalLM, "run_layers", lambda model, x, batch, inputs=(): x)
    with idle_device(), layers, mock.patch.object(LlamaForCausalLM, "best", best):
        yield


def timed(method: Callable[..., Any], part: str, least: dict[str, float]) -> Callable[..., Any]:
    """Return the method, which notes the least CPU time of its calls, in microseconds, by part."""

    def call(*args: Any) -> Any:
        started = time.thread_time()
        result = method(*args)
        least[part] = min(1e6 * (time.thread_time() - started), least.get(part, float("inf")))
        return result

    return call


def measure(core: EngineCore, steps: int) -> dict[str, float]:
    """Return the least CPU time of each part of a step; `loop` is what is left of the loop's thread."""
    for _ in range(UNMEASURED):
        step(core)
    least: dict[str, float] = {}
    group = core.ranks.runner.tp
    exchange = group.expert_exchange if isinstance(group, PartGroup) else None
    places: list[tuple[Any, str]] = [(core.scheduler, "schedule"), (core.scheduler, "commit")]
    places += [(core.ranks.runner, name) for name in ("prepare", "launch", "collect")]
    for owner, name in places:
        setattr(owner, name, timed(getattr(owner, name), name, least))
    if exchange is not None:
        exchange.begin = timed(exchange.begin, EXCHANGE, least)  # type: ignore[method-assign]
    total = float("inf")
    for _ in range(steps):
        started = time.thread_time()
        step(core)
        total = min(total, 1e6 * (time.thread_time() - started))
    alone = type(core.ranks.launcher) is Launcher
    in_loop = ("schedule", "prepare", "collect", "commit", *(["launch"] if alone else []))
    return {**least, "loop": total - sum(least[part] for part in in_loop)}


def add(add_request: Callable[[GenerateRequest], None], count: int) -> None:
    for i in range(count):
        prompt = [3 + (i + j) % 900 for j in range(PROMPT)]
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)
        add_request(GenerateRequest(request_id=str(i), prompt=prompt, params=params))


def main(
    rows: Annotated[str, typer.Option(help="Sequences of a step; one or more numbers.")] = "16,64",
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure.")] = 200,
    as_json: JsonOption = False,
) -> None:
    """Measure the host's µs per decode step of the first of several ranks, on devices that compute nothing.

    Example: python -m benchmarks.group_host --rows 16,64
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, IdlePool() as pool, no_compute():
        (Path(folder) / "config.json").write_text(json.dumps(MIXTURE), encoding="utf-8")
        results = {
            f"{name}, {count}": measure_layout(pool, folder, layout, int(count), steps)
            for count in rows.split(",")
            for name, layout in LAYOUTS.items()
        }
    if as_json:
        print_json(results)
        return
    table = make_table("µs per step", *results)
    for part in (*PARTS, EXCHANGE):
        table.add_row(part, *(figure(found[part]) if part in found else "" for found in results.values()))
    show(f"CPU time of the first rank's threads, the least of {steps} steps", table)


def measure_layout(pool: RankPool, folder: str, layout: dict[str, Any], rows: int, steps: int) -> dict[str, float]:
    """Measure steps of `rows` sequences on the first rank: each stage has as many, and each engine."""
    stages, engines = layout.get("pipeline_parallel_size", 1), layout.get("data_parallel_size", 1)
    config = EngineConfig(
        model=folder, load_format="dummy", max_num_seqs=rows * stages, num_gpu_blocks_override=32 * rows * stages,
        block_size=64,
        max_num_batched_tokens=max(1024, 8 * rows), num_threads=1, **layout,
    )  # fmt: skip
    with running(pool, config) if engines > 1 else pool.engine(config) as engine:
        core = engine if isinstance(engine, EngineCore) else engine.core
        add(engine.add, rows * stages * engines)
        while any(request.num_output == 0 for request in core.scheduler.queue.live.values()):
            engine.step()
        found = measure(core, steps)
        assert len(core.scheduler.queue.running) == rows * stages, "some have ended"
        abort = core.abort if isinstance(engine, EngineCore) else engine.group.abort
        for i in range(rows * stages * engines):
            abort(str(i))
    return found


if __name__ == "__main__":
    run(main)
