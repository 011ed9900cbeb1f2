"""The fraction of allocated KV memory that holds no token: paging against reserving the longest possible sequence.

The real scheduler and block pool run a mix of requests; only the model is left out. Claims to check: PagedAttention
wastes under 4 % of what it allocates, reserving the maximum 60 to 80 % (Kwon et al. 2023, arXiv:2309.06180, section
1 and figure 2).
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.progress import track

from benchmarks.command import JsonOption, print_json, run
from cluster.cli.bench.tables import make_table, show
from engine.config import EngineConfig
from engine.core.block_pool import BlockPool
from engine.core.request_checks import ModelLimits
from engine.core.scheduler import Scheduler
from engine.wire.messages import GenerateRequest
from engine.wire.plan import StepPlan, StepResult
from engine.wire.sampling_params import SamplingParams

SIGMA = 1.0  # spread of both log-normal distributions
TOKEN = 1  # the answer of the absent model


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Fractions of allocated token slots that hold no token, averaged over all steps."""

    requests: int
    steps: int
    mean_prompt: float
    mean_output: float
    mean_running: float
    preemptions: int
    paged_waste: float
    reserved_waste: float


def measure(
    *,
    requests: int = 1000,
    mean_prompt: float = 1155,
    mean_output: float = 211,
    block_size: int = 16,
    max_model_len: int = 4096,
    kv_tokens: int = 131072,
    seed: int = 0,
    progress: bool = True,
) -> MemoryReport:
    """Run log-normal lengths, cut to the context, through scheduler and pool, as fast as they are taken.

    The default means are those of Azure's conversation trace (Splitwise, arXiv:2311.18677).
    """
    config = EngineConfig(block_size=block_size, max_num_seqs=256, max_num_batched_tokens=8192, max_waiting=requests)
    pool = BlockPool(kv_tokens // block_size, block_size, enable_prefix_caching=False)
    scheduler = Scheduler(config, pool, limits=ModelLimits(max_model_len, vocab_size=2))
    rng = random.Random(seed)
    lengths = [draw_lengths(rng, mean_prompt, mean_output, max_model_len) for _ in range(requests)]
    for number, (prompt, output) in enumerate(lengths):
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        scheduler.add(GenerateRequest(request_id=str(number), prompt=[TOKEN] * prompt, params=params), now=0.0)
    paged = reserved = filled = steps = running = 0
    for _ in track(range(requests), "running requests", disable=not progress):
        ended = False
        while not ended and scheduler.has_work:
            plan = scheduler.schedule(now=0.0)
            assert plan is not None
            events = scheduler.commit(result_of(plan), now=0.0)
            ended = any(event.delta.finish_reason for event in events)
            steps += 1
            running += len(scheduler.queue.running)
            filled += sum(request.computed for request in scheduler.queue.running)
            paged += pool.num_used * block_size
            reserved += len(scheduler.queue.running) * max_model_len
    return MemoryReport(
        requests=requests,
        steps=steps,
        mean_prompt=sum(prompt for prompt, _ in lengths) / requests,
        mean_output=sum(output for _, output in lengths) / requests,
        mean_running=running / steps,
        preemptions=scheduler.totals.preemptions,
        paged_waste=1 - filled / paged,
        reserved_waste=1 - filled / reserved,
    )


def draw_lengths(rng: random.Random, mean_prompt: float, mean_output: float, limit: int) -> tuple[int, int]:
    """Draw the tokens of prompt and output: at least one each, and at most `limit` together."""
    # the mean of a log-normal distribution is exp(mu + sigma^2 / 2)
    prompt = round(rng.lognormvariate(math.log(mean_prompt) - SIGMA**2 / 2, SIGMA))
    output = round(rng.lognormvariate(math.log(mean_output) - SIGMA**2 / 2, SIGMA))
    prompt = min(max(prompt, 1), limit - 1)
    return prompt, min(max(output, 1), limit - prompt)


def result_of(plan: StepPlan) -> StepResult:
    count = len(plan.slots)
    return StepResult(
        plan.step, [[TOKEN] if samples else [] for samples in plan.samples], [None] * count, [None] * count
    )


def show_report(report: MemoryReport, block_size: int, max_model_len: int) -> None:
    table = make_table("", "allocated but empty")
    table.add_row(f"paged, blocks of {block_size}", f"{report.paged_waste:.1%}")
    table.add_row(f"reserving the maximum ({max_model_len})", f"{report.reserved_waste:.1%}")
    table.add_row("claimed by Kwon et al. 2023", "< 4 % and 60 to 80 %")
    show(
        f"{report.requests} requests, {report.mean_prompt:.0f} tokens in and {report.mean_output:.0f} out on average, "
        f"{report.mean_running:.0f} running at a time",
        table,
    )


def main(
    requests: Annotated[int, typer.Option(min=1, help="How many requests to run.")] = 1000,
    mean_prompt: Annotated[float, typer.Option(min=1, help="Tokens; log-normal.")] = 1155,
    mean_output: Annotated[float, typer.Option(min=1, help="Tokens; log-normal.")] = 211,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per KV block.")] = 16,
    max_model_len: Annotated[int, typer.Option(min=2, help="The context; what reserving would reserve.")] = 4096,
    as_json: JsonOption = False,
) -> None:
    """Measure the KV memory that holds no token: paging against reserving the longest possible sequence.

    Example: python -m benchmarks.memory --mean-prompt 200 --mean-output 100
    """
    report = measure(
        requests=requests, mean_prompt=mean_prompt, mean_output=mean_output, block_size=block_size,
        max_model_len=max_model_len, progress=sys.stderr.isatty(),
    )  # fmt: skip
    if as_json:
        print_json(asdict(report))
    else:
        show_report(report, block_size, max_model_len)


if __name__ == "__main__":
    run(main)
