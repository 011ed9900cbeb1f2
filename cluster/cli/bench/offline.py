"""Throughput and latency of an engine in this process, without HTTP."""

from __future__ import annotations

import itertools
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from cluster.cli.bench.distribution import Distribution
from cluster.cli.bench.load import OfflineLoad
from cluster.cli.bench.prompts import WARM_UP, BenchRequest
from engine.model.checkpoint.resolve import resolve
from engine.model.config import ModelConfig
from engine.offline.llm import LLM
from engine.offline.outputs import CompletionOutput
from engine.wire.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class OfflineReport:
    """Report of an offline measurement. Each Distribution has one value per repetition."""

    model: str
    workload: str
    dtype: str
    threads: int
    requests: int  #: number of requests per repetition
    input_len: int
    output_len: int
    repetitions: int
    failed: int  #: requests that ended in an error, warm-up included
    output_tokens_per_s: Distribution | None
    total_tokens_per_s: Distribution | None
    ttft_ms: Distribution | None  #: median over a repetition's requests, which queue for the engine
    tpot_ms: Distribution | None  #: likewise, per token after the first
    loaded_s: float | None  #: from the start of this process until the engine takes requests; None if unknown
    ready_s: float | None  #: the same, until the warm-up is answered
    peak_rss_gib: float  #: of this process; other ranks have their own


@dataclass(frozen=True, slots=True)
class Repetition:
    """One batch, from its first request to its last token."""

    seconds: float
    input_tokens: int
    outputs: list[CompletionOutput]

    @property
    def output_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def failed(self) -> int:
        return sum(output.finish_reason in ("error", "abort") for output in self.outputs)

    @property
    def ttft_ms(self) -> Distribution | None:
        return Distribution.of([1e3 * output.times.first_token_s for output in self.outputs if output.times])

    @property
    def tpot_ms(self) -> Distribution | None:
        values = []
        for output in self.outputs:
            if output.times and len(output.token_ids) > 1:
                decoding = output.times.finished_s - output.times.first_token_s
                values.append(1e3 * decoding / (len(output.token_ids) - 1))
        return Distribution.of(values)


def measure(load: OfflineLoad, *, model: str = "pocket", progress: Progress, **options: Any) -> OfflineReport:
    """Generate greedily to the full length, several times with new prompts. Returns the report. options: fields of
    EngineConfig.

    Raises StartupError, or RequestError if the engine would refuse the requests.
    """
    model_config, repetitions = ModelConfig.from_folder(resolve(model)), load.repetitions
    first = load.batch(0, model, model_config.vocab_size)
    with LLM(model, **options) as llm:
        for job in first:
            llm.check(llm.request(job.prompt, params_of(job)), params_of(job))
        loaded_s = process_age_s()
        task = progress.add_task("warming up", total=(load.warmup + repetitions) * len(first))

        def run(number: int) -> Repetition:
            return run_batch(llm, load.batch(number, model, model_config.vocab_size), lambda: progress.advance(task))

        warm = [run(WARM_UP + i) for i in range(load.warmup)]
        ready_s = process_age_s()
        progress.update(task, description="measuring")
        runs = [run(i) for i in range(repetitions)]
        asked = llm.config.dtype
    return OfflineReport(
        model=Path(model).name,
        workload=load.workload or "random",
        dtype=model_config.dtype if asked == "auto" else asked,
        threads=torch.get_num_threads(),
        requests=len(first),
        input_len=len(first[0].prompt),
        output_len=first[0].max_tokens,
        repetitions=repetitions,
        failed=sum(r.failed for r in itertools.chain(warm, runs)),
        output_tokens_per_s=Distribution.of([r.output_tokens / r.seconds for r in runs]),
        total_tokens_per_s=Distribution.of([(r.input_tokens + r.output_tokens) / r.seconds for r in runs]),
        ttft_ms=Distribution.of([ttft.median for r in runs if (ttft := r.ttft_ms)]),
        tpot_ms=Distribution.of([tpot.median for r in runs if (tpot := r.tpot_ms)]),
        loaded_s=loaded_s,
        ready_s=ready_s,
        peak_rss_gib=peak_rss_bytes() / 2**30,
    )


def run_batch(llm: LLM, jobs: list[BenchRequest], advance: Callable[[], None]) -> Repetition:
    started = time.perf_counter()
    pairs = [(llm.request(job.prompt, params_of(job)), params_of(job)) for job in jobs]
    outputs = []
    for done in llm.run(pairs, use_tqdm=False):
        outputs += done.outputs
        advance()
    return Repetition(time.perf_counter() - started, sum(len(job.prompt) for job in jobs), outputs)


def params_of(job: BenchRequest) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True)


def process_age_s() -> float | None:
    """Return the seconds since this process started, imports included; None on systems other than Linux."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as file:
            fields = file.read().rpartition(")")[2].split()
    except FileNotFoundError:
        return None
    ticks = int(fields[19])  # field 22 in proc(5), `starttime`: ticks from boot; the name before may hold spaces
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # macOS counts bytes, Linux KiB
