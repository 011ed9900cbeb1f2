"""Breakdown of a decode step's time, in microseconds, beside the time that reading weights and KV must take.

The methods of one ordinary engine are wrapped on its objects, so nothing is slower elsewhere. Its steps run one after
another (`async_scheduling=False`), so the parts add up to the whole.
"""

from __future__ import annotations

import functools
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress
from torch.profiler import ProfilerActivity, record_function

from benchmarks.command import DtypeOption, JsonOption, ModelOption, SeedOption, print_json, run
from benchmarks.memory_floor import kv_bytes, measure_bandwidth, synchronise, weight_bytes
from cluster.cli.bench.distribution import Distribution
from cluster.cli.bench.prompts import random_ids
from cluster.terminal.progress import progress_bar
from cluster.terminal.tables import figure, make_table, show
from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.devices.device import is_gpu, open_device
from engine.engine_options import BLOCK_SIZES
from engine.errors import EngineError, InvalidParameter
from engine.model.checkpoint.resolve import resolve
from engine.model.config import ModelConfig
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams

UNMEASURED = 5  # decode steps before the clock starts, for buffers and caches
PARTS = ("schedule", "prepare", "forward", "logits", "rest", "commit", "loop")


@dataclass(frozen=True, slots=True)
class BatchReport:
    """Medians over the steps, in microseconds."""

    batch_size: int
    context_len: float
    parts: dict[str, float]
    """Time by the names in PARTS. forward: the model up to its last hidden states. logits: the head, with the choice of
    the likeliest token. rest: the runner beside these: token ids in and out, other sampling. loop: the rest."""
    total_us: float
    weight_bytes: float
    kv_bytes: float
    floor_us: float  #: weights and KV, of the middle of the run, over the measured bandwidth
    total_over_floor: float


@dataclass(frozen=True, slots=True)
class OpTime:
    """A torch operation in an average step, without the operations that it calls.

    Names without `::` are layers, or the parts of a step: their time is Python, and kernels that are not torch's.
    """

    op: str
    calls: float
    self_us: float


@dataclass(frozen=True, slots=True)
class StepReport:
    model: str
    dtype: str
    threads: int
    steps: int
    bandwidth_gb_per_s: float
    batches: list[BatchReport]
    profile: list[OpTime] | None  #: of the largest batch, costliest first; watching slows them a little


class Stopwatch:
    """Microseconds spent in wrapped methods, by label; what one of them spends in another counts for that one only."""

    def __init__(self, device: torch.device):
        self._device = device
        self._spent: dict[str, float] = defaultdict(float)
        self._inner_us = [0.0]  # for each wrapped method that is running: time in wrapped methods that it called

    def wrap(self, owner: Any, name: str, label: str) -> None:
        """Time a method of this one object: an attribute of the object hides the method of its class."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner_us.append(0.0)
            started = time.perf_counter()
            result = method(*args, **kwargs)
            synchronise(self._device)
            whole_us = 1e6 * (time.perf_counter() - started)
            self._spent[label] += whole_us - self._inner_us.pop()
            self._inner_us[-1] += whole_us
            return result

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        """Return the time spent since the last call."""
        spent, self._spent = self._spent, defaultdict(float)
        return spent


class Decoder:
    """Brings an engine to where all its sequences decode, and nothing else happens."""

    def __init__(self, core: EngineCore, vocab_size: int, context_len: int, seed: int):
        self.core = core
        self._vocab_size, self._context_len = vocab_size, context_len
        self._rng = random.Random(seed)
        self._live: list[str] = []

    def start(self, batch_size: int) -> None:
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)
        self._live = [str(i) for i in range(batch_size)]
        for request_id in self._live:
            prompt = random_ids(self._rng, self._context_len, self._vocab_size)
            self.core.add(GenerateRequest(request_id=request_id, prompt=prompt, params=params))
        decoding: set[str] = set()
        while len(decoding) < batch_size:
            decoding |= self.step()
        for _ in range(UNMEASURED):
            self.step()

    def step(self) -> set[str]:
        """Run a step and return the requests that got a token."""
        events = self.core.step()
        for event in events:
            if event.delta.finish_reason:
                reason = event.delta.error.message if event.delta.error else "it ended before the measurement did"
                raise EngineError(event.delta.request_id, reason)
        return {event.delta.request_id for event in events}

    def lengths(self) -> list[int]:
        """Return the tokens of each sequence; those whose prompt came first are ahead."""
        return [request.computed for request in self.core.scheduler.queue.running]

    def stop(self) -> None:
        for request_id in self._live:
            self.core.abort(request_id)


def measure(
    *,
    model: str = "pocket",
    batch_sizes: Sequence[int] = (1, 16, 64),
    context_len: int = 256,
    steps: int = 50,
    profile: bool = False,
    seed: int = 0,
    progress: Progress,
    **options: Any,
) -> StepReport:
    """Decode `steps` tokens greedily for each batch size, from `context_len` tokens on.

    profile: afterwards let torch's profiler watch the largest batch.
    options: fields of EngineConfig; the KV cache is as large as the largest batch needs.
    Raises StartupError, or InvalidParameter where the model's context is too short.
    """
    if min(batch_sizes) < 1:
        raise InvalidParameter("batch_sizes", min(batch_sizes), "at least 1")
    model_config = ModelConfig.from_folder(resolve(model, weights=options.get("load_format") != "dummy"))
    core = build_engine(config_for(model, model_config, max(batch_sizes), context_len, steps, options))
    device, dtype = core.ranks.runner.device.torch_device, core.ranks.runner.dtype
    bandwidth = measure_bandwidth(device)
    watch = Stopwatch(device)
    for owner, name, part in timed_methods(core):
        watch.wrap(owner, name, part)
    decoder = Decoder(core, model_config.vocab_size, context_len, seed)
    task = progress.add_task("decoding", total=steps * (len(batch_sizes) + profile))
    batches = []
    for size in batch_sizes:
        progress.update(task, description=f"batch size {size}")
        decoder.start(size)
        lengths = [length + steps // 2 for length in decoder.lengths()]
        watch.take()
        spent = []
        for _ in range(steps):
            decoder.step()
            spent.append(watch.take())
            progress.advance(task)
        decoder.stop()
        weights, kv = weight_bytes(model_config, dtype, size), kv_bytes(model_config, dtype, lengths)
        batches.append(summarise(spent, lengths, weights, kv, bandwidth))
    operations = None
    if profile:
        progress.update(task, description="profiling")
        decoder.start(max(batch_sizes))
        operations = profile_steps(decoder, steps)
        decoder.stop()
    core.close()
    return StepReport(
        model=Path(model).name,
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        steps=steps,
        bandwidth_gb_per_s=bandwidth / 1e9,
        batches=batches,
        profile=operations,
    )


def config_for(
    model: str, model_config: ModelConfig, batch_size: int, context_len: int, steps: int, options: dict[str, Any]
) -> EngineConfig:
    """Return the configuration of an engine that holds one batch until the last of its steps."""
    defaults = EngineConfig()
    budget = options.get("max_num_batched_tokens", defaults.max_num_batched_tokens)
    block_size = options.get("block_size") or BLOCK_SIZES[open_device(options.get("device", "auto")).torch_device.type]
    # no clock reads times inside a graph of a GPU, or stops while one is captured
    eager = options.get("enforce_eager", False) or is_gpu(options.get("device", "auto"))
    # while the last prompts are computed, the first sequences decode; one token each is the prompt's, one to spare
    ahead = -(-batch_size * context_len // max(1, budget - batch_size)) + 1
    longest = context_len + ahead + UNMEASURED + steps + 2
    if longest > model_config.max_position_embeddings:
        limit = (
            f"at most {model_config.max_position_embeddings - longest + context_len}, with {steps} steps and batches"
        )
        limit += f" of {batch_size}: the model's context is {model_config.max_position_embeddings} tokens"
        raise InvalidParameter("context_len", context_len, limit)
    return EngineConfig(
        model=model,
        max_model_len=longest,
        max_num_seqs=batch_size,
        num_gpu_blocks_override=batch_size * (-(-longest // block_size) + 1),
        async_scheduling=False,
        **options | {"block_size": block_size, "enforce_eager": eager},
    )


def timed_methods(core: EngineCore) -> Iterator[tuple[Any, str, str]]:
    """Yield objects, the names of their methods, and the part that the time of each belongs to."""
    yield core, "step", "loop"
    yield core.scheduler, "schedule", "schedule"
    yield core.scheduler, "commit", "commit"
    yield core.ranks.runner, "prepare", "prepare"
    yield core.ranks.runner, "launch", "rest"
    yield core.ranks.runner, "collect", "rest"
    yield core.ranks.runner, "_forward", "forward"
    yield core.ranks.runner.model, "logits", "logits"
    yield core.ranks.runner.model, "best", "logits"


def summarise(
    spent: list[dict[str, float]], lengths: list[int], weights: float, kv: float, bandwidth: float
) -> BatchReport:
    total_us = median([sum(step.values()) for step in spent])
    floor_us = 1e6 * (weights + kv) / bandwidth
    return BatchReport(
        batch_size=len(lengths),
        context_len=sum(lengths) / len(lengths),
        parts={part: median([step.get(part, 0.0) for step in spent]) for part in PARTS},
        total_us=total_us,
        weight_bytes=weights,
        kv_bytes=kv,
        floor_us=floor_us,
        total_over_floor=total_us / floor_us,
    )


def median(values: Sequence[float]) -> float:
    summary = Distribution.of(values)
    assert summary is not None, "there is at least one step"
    return summary.median


def profile_steps(decoder: Decoder, steps: int) -> list[OpTime]:
    """Profile some steps; the costliest operations come first."""
    for owner, name, part in timed_methods(decoder.core):
        setattr(owner, name, recorded(getattr(owner, name), part))
    for module in decoder.core.ranks.runner.model.children():
        for layer in module.modules():
            layer.forward = recorded(layer.forward, type(layer).__name__)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            decoder.step()
    times = [OpTime(e.key, e.count / steps, e.self_cpu_time_total / steps) for e in profiler.key_averages()]
    return sorted(times, key=lambda time: -time.self_us)


def recorded(function: Callable[..., Any], label: str) -> Callable[..., Any]:
    """Wrap a function so that the profiler shows it under this name."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(label):
            return function(*args, **kwargs)

    return call


def show_report(report: StepReport, profile_rows: int) -> None:
    table = make_table("batch size", *(str(batch.batch_size) for batch in report.batches))

    def row(name: str, values: Iterable[float], decimals: int = 0) -> None:
        table.add_row(name, *(figure(value, decimals) for value in values))

    for part in report.batches[0].parts:
        row(part, (batch.parts[part] for batch in report.batches))
    table.add_section()
    row("total", (batch.total_us for batch in report.batches))
    row("floor", (batch.floor_us for batch in report.batches))
    row("total / floor", (batch.total_over_floor for batch in report.batches), 2)
    table.add_section()
    row("tokens of context", (batch.context_len for batch in report.batches))
    row("weights, MB", (batch.weight_bytes / 1e6 for batch in report.batches), 1)
    row("KV, MB", (batch.kv_bytes / 1e6 for batch in report.batches), 1)
    show(
        f"{report.model}, {report.dtype}, {report.threads} threads: µs per decode step, median of {report.steps}",
        table,
        f"floor: weights and KV at {report.bandwidth_gb_per_s:.1f} GB/s, measured just before",
    )
    if report.profile is not None:
        operations = make_table("operation", "calls", "µs", "fraction")
        whole = sum(op.self_us for op in report.profile)
        for op in report.profile[:profile_rows]:
            operations.add_row(op.op, figure(op.calls), figure(op.self_us), f"{op.self_us / whole:.1%}")
        largest = max(batch.batch_size for batch in report.batches)
        show(f"\nown time of the operations in a step, batch size {largest}", operations)


def parse_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()] or [0]
    except ValueError as e:
        raise InvalidParameter("batch_sizes", text, "numbers with commas between them, like 1,16,64") from e


def main(
    model: ModelOption = "pocket",
    batch_sizes: Annotated[str, typer.Option(help="Sequences that decode together; one or more numbers.")] = "1,16,64",
    context_len: Annotated[int, typer.Option(min=1, help="Tokens that each of them has before.")] = 256,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps to measure.")] = 50,
    profile: Annotated[bool, typer.Option("--profile", help="Also show the costliest torch operations.")] = False,
    profile_rows: Annotated[int, typer.Option(min=1, help="Number of operations to show.")] = 15,
    seed: SeedOption = 0,
    dtype: DtypeOption = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: one per core.")] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens that one step may compute.")] = 2048,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens per KV block. Default: what the device likes.")
    ] = None,
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="Decode kernel by kernel on a CPU, as with --profile.")
    ] = False,
    load_format: Annotated[str, typer.Option(help="`dummy` makes random weights of the model's shapes.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Break down the time of a decode step, in µs, and compare it with the minimum that it could take.

    The floor is the time to read the weights, and the KV and states of the batch, once, at the bandwidth that torch
    reaches on this machine; arithmetic is not in it, so large batches cannot reach it. A model that fits into the
    caches can go below. Planning is part of the total here, which a running engine does while the model computes.

    Example: python -m benchmarks.step --batch-sizes 1,8 --context-len 1000 --profile
    """
    with progress_bar() as progress:
        report = measure(
            model=model, batch_sizes=parse_numbers(batch_sizes), context_len=context_len, steps=steps, profile=profile,
            seed=seed, progress=progress, dtype=dtype, num_threads=threads,
            max_num_batched_tokens=max_num_batched_tokens, block_size=block_size,
            enforce_eager=enforce_eager or profile, load_format=load_format,
        )  # fmt: skip
    if as_json:
        fields: dict[str, Any] = asdict(report)
        fields["profile"] = fields["profile"] and fields["profile"][:profile_rows]
        print_json(fields)
    else:
        show_report(report, profile_rows)


if __name__ == "__main__":
    run(main)
