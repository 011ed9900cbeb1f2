"""Cost of transformers' own model code over our attention, against the native code of the same model.

Both engines hold the same model in one process and take turns, so that whatever else the machine does meets both.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.command import DtypeOption, JsonOption, print_report, run
from benchmarks.step import Decoder, config_for, parse_numbers
from cluster.cli.bench.prompts import random_ids
from cluster.terminal.tables import figure, make_table, show
from engine.assembly.build import build_engine
from engine.core.engine import EngineCore
from engine.errors import InvalidParameter
from engine.model.checkpoint.resolve import resolve
from engine.model.config import ModelConfig
from engine.model.families.family import families
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams

PROMPTS = 5
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": True, "dtype": "bfloat16", "eos_token_id": 151645,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class BatchReport:
    """Median milliseconds of a decode step."""

    batch_size: int
    native_ms: float
    transformers_ms: float
    cost: float  #: transformers_ms / native_ms - 1
    cpu_cost: float  #: the same of the CPU's time: with one thread it does not count what other processes do


@dataclass(frozen=True, slots=True)
class FallbackReport:
    model: str
    dtype: str
    context_len: int
    threads: int
    steps: int  #: of each engine and batch size
    batches: list[BatchReport]
    prompt: BatchReport  #: a step that computes `batch_size` tokens of one prompt


@contextmanager
def without_native_code(architecture: str) -> Iterator[None]:
    """Leave a family out of the table, so that transformers' code computes it."""
    before = dict(families())
    del families()[architecture]
    try:
        yield
    finally:
        families().clear()
        families().update(before)  # in the order that it had, which others read


def measure(
    model: str, batch_sizes: list[int], context_len: int, steps: int, dtype: str, threads: int
) -> FallbackReport:
    """model: `qwen3-0.6b` for random weights of that shape. Raises StartupError, or InvalidParameter."""
    with tempfile.TemporaryDirectory() as made:
        random_weights = model == "qwen3-0.6b"
        if random_weights:
            (Path(made) / "config.json").write_text(json.dumps(QWEN3_06B))
        folder, load_format = (Path(made), "dummy") if random_weights else (resolve(model), "auto")
        shape = ModelConfig.from_folder(folder)
        if shape.architecture not in families():
            raise InvalidParameter("model", model, "of a native family")
        options = {"dtype": dtype, "load_format": load_format, "num_threads": threads or None}
        config = config_for(str(folder), shape, max(batch_sizes), context_len, steps, options)
        cores = {"native": build_engine(config)}
        with without_native_code(shape.architecture):
            cores["transformers"] = build_engine(config)
    decoders = {name: Decoder(core, shape.vocab_size, context_len, seed=0) for name, core in cores.items()}
    report = FallbackReport(
        model=model,
        dtype=str(cores["native"].ranks.runner.dtype).removeprefix("torch."),
        context_len=context_len,
        threads=torch.get_num_threads(),
        steps=steps,
        batches=[decode(decoders, size, steps) for size in batch_sizes],
        prompt=prefill(cores, context_len, shape.vocab_size),
    )
    for core in cores.values():
        core.close()
    return report


def decode(decoders: dict[str, Decoder], batch_size: int, steps: int) -> BatchReport:
    watches = {name: Stopwatch() for name in decoders}
    for decoder in decoders.values():
        decoder.start(batch_size)
    for _ in range(steps):
        for name, decoder in decoders.items():
            with watches[name]:
                decoder.step()
    for decoder in decoders.values():
        decoder.stop()
    return summarise(batch_size, watches)


def prefill(cores: dict[str, EngineCore], tokens: int, vocab_size: int) -> BatchReport:
    """Compute prompts that differ, each in one step."""
    watches = {name: Stopwatch() for name in cores}
    for number in range(PROMPTS):
        for name, core in cores.items():
            prompt = random_ids(random.Random(number), tokens, vocab_size)
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1)
            core.add(GenerateRequest(request_id="prompt", prompt=prompt, params=params))
            with watches[name]:
                while core.has_work:
                    core.step()
    return summarise(tokens, watches)


class Stopwatch:
    """Milliseconds of each of its `with` blocks."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def __enter__(self) -> None:
        self._started = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        wall, cpu = self._started
        self.wall.append(1e3 * (time.perf_counter() - wall))
        self.cpu.append(1e3 * (time.process_time() - cpu))


def summarise(batch_size: int, watches: dict[str, Stopwatch]) -> BatchReport:
    native, other = watches["native"], watches["transformers"]
    native_ms, other_ms = statistics.median(native.wall), statistics.median(other.wall)
    cpu_cost = statistics.median(other.cpu) / statistics.median(native.cpu) - 1
    return BatchReport(batch_size, native_ms, other_ms, other_ms / native_ms - 1, cpu_cost)


def show_report(report: FallbackReport) -> None:
    table = make_table("step of", "native ms", "transformers ms", "cost", "cost in CPU time")
    rows = [(f"{batch.batch_size} sequences", batch) for batch in report.batches]
    for name, batch in [*rows, (f"{report.prompt.batch_size} tokens of a prompt", report.prompt)]:
        costs = (f"{100 * cost:.1f} %" for cost in (batch.cost, batch.cpu_cost))
        table.add_row(name, figure(batch.native_ms), figure(batch.transformers_ms), *costs)
    show(table)


def main(
    model: Annotated[
        str, typer.Option(help="`qwen3-0.6b` (random weights of that shape), `pocket`, a folder, or a Hub id.")
    ] = "qwen3-0.6b",
    batch_sizes: Annotated[str, typer.Option(help="Sequences that decode together; one or more numbers.")] = "1,16",
    context_len: Annotated[int, typer.Option(min=1, help="Tokens that each of them has before.")] = 256,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps of each engine, in turns.")] = 50,
    dtype: DtypeOption = "auto",
    threads: Annotated[int, typer.Option(min=0, help="Threads of both; 0 for one on each core.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Compare steps of a native family with those of transformers' own code for the same model.

    Example: python -m benchmarks.fallback --model pocket
    """
    report = measure(model, parse_numbers(batch_sizes), context_len, steps, dtype, threads)
    print_report(report, as_json, show_report)


if __name__ == "__main__":
    run(main)
