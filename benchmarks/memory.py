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
from cluster.terminal.tables import make_table, show
from engine.config import EngineConfig
from engine.core.block_pool import BlockPool
from engine.core.door.inputs import Added
from engine.core.door.kernel import ModelLimits
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.scheduler import Scheduler
from engine.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from engine.model.config_parts.recurrent import RecurrentConfig
from engine.model.kv_groups import KVCacheGroup, KVCacheSpec
from engine.model.state import state_specs
from engine.parts.kv_groups.kv_cache_groups import kv_cache_of
from engine.runner.kv_cache import GIB, WINDOW_STEP_TOKENS, GroupNeed, divide, most, total_bytes
from engine.wire.generate_request import GenerateRequest
from engine.wire.plan import StepPlan, StepResult
from engine.wire.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model keeps of a sequence, in two bytes a number but for recurrent states."""

    groups: list[tuple[int, int, int, int | None]]
    """Of each KV cache group: layers, KV heads, head_dim, window."""
    recurrent: RecurrentConfig | None = None

    @property
    def slot_bytes(self) -> int:
        """Those of the states of a sequence that runs, with the rows since their last border."""
        return sum(spec.kept_bytes + spec.row_bytes for spec in state_specs(self.recurrent, "bfloat16"))

    @property
    def state_bytes(self) -> int:
        """Those that the recurrence of one token needs: its matrices, and the inputs of its convolutions."""
        if (r := self.recurrent) is None:
            return 0
        return len(r.layers) * (4 * r.heads * r.key_dim * r.value_dim + 2 * (r.kernel - 1) * r.channels_per_rank(1))

    @property
    def token_bytes(self) -> int:
        """Those of a token whose KV is in all layers."""
        recurrent = 0 if self.recurrent is None else len(self.recurrent.layers)
        _, heads, size, _ = self.groups[0]
        return 4 * heads * size * (recurrent + sum(layers for layers, *_ in self.groups))


QWEN3_NEXT = RecurrentConfig(
    layers=tuple(layer for layer in range(48) if layer % 4 != 3),
    kernel=4, heads=32, key_heads=16, key_dim=128, value_dim=128,
)  # fmt: skip
SHAPES = {
    "gpt-oss 20B": Shape([(12, 8, 64, None), (12, 8, 64, 128)]),
    "Gemma 3 27B": Shape([(10, 16, 128, None), (52, 16, 128, 1024)]),
    "Gemma 3 4B": Shape([(5, 4, 256, None), (29, 4, 256, 1024)]),
    "Qwen3-Next 80B": Shape([(12, 2, 256, None)], QWEN3_NEXT),
}
MAX_NUM_SEQS = 256
SIGMA = 1.0  # spread of both log-normal distributions
TOKEN = 1  # the answer of the absent model
DECODED = 256  # tokens at the end of a long sequence


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
    kv_cache = KVCacheManager([SingleTypeKVCacheManager(pool)])
    scheduler = Scheduler(config, kv_cache, limits=ModelLimits(max_model_len, vocab_size=2))
    rng = random.Random(seed)
    lengths = [draw_lengths(rng, mean_prompt, mean_output, max_model_len) for _ in range(requests)]
    for number, (prompt, output) in enumerate(lengths):
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        scheduler.apply(Added(GenerateRequest(request_id=str(number), prompt=[TOKEN] * prompt, params=params)), 0.0)
    paged = reserved = filled = steps = running = 0
    for _ in track(range(requests), "running requests", disable=not progress):
        ended = False
        while not ended and scheduler.has_work:
            plan = scheduler.schedule(now=0.0)
            assert plan is not None
            scheduler.commit(result_of(plan), now=0.0)
            ended = any(event.delta.finish_reason for event in scheduler.out.take_events())
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


@dataclass(frozen=True, slots=True)
class GroupsReport:
    """KV and states of one long sequence, by layers of each kind, or KV in all layers as in one tensor."""

    model: str
    context: int
    needed_gib: float  #: all tokens of the layers that see all, the windows of others, and a state
    held_gib: float
    one_group_gib: float
    sequences: int  #: of this length, in the bytes for ten of them in one group
    short_sequences: int  #: of an eighth of it, in the same bytes


def measure_groups(model: str, context: int, block_size: int) -> GroupsReport:
    """Decode the last tokens of a sequence by the real scheduler, and divide memory as an engine does."""
    shape = SHAPES[model]
    needs = [
        GroupNeed(
            KVCacheGroup(KVCacheSpec(num_kv_heads=heads, head_dim=size, window=window), tuple(range(layers))),
            block_size,
            block_bytes=4 * layers * heads * size * block_size,
            step_tokens=WINDOW_STEP_TOKENS,
        )
        for layers, heads, size, window in shape.groups
    ]
    pools = [BlockPool(need.of(context), block_size, null_block=need.group.spec.window is not None) for need in needs]
    kv_cache, limits = kv_cache_of([need.group.spec for need in needs], pools, WINDOW_STEP_TOKENS)
    config = EngineConfig(block_size=block_size, max_num_seqs=1, max_num_batched_tokens=8192)
    scheduler = Scheduler(config, kv_cache, limits=ModelLimits(context, vocab_size=2), parts=limits)
    params = SamplingParams(max_tokens=DECODED, ignore_eos=True)
    request = scheduler.apply(
        Added(GenerateRequest(request_id="", prompt=[TOKEN] * (context - DECODED), params=params)), 0.0
    )
    held: list[int] = []
    needed: list[int] = []
    while plan := scheduler.schedule(now=0.0):
        scheduler.commit(result_of(plan), now=0.0)
        if request.num_output and request.tables:
            held.append(shape.slot_bytes + total_bytes(needs, [pool.num_used for pool in pools]))
            kept = [request.computed - need.group.spec.first_needed(request.computed - 1) for need in needs]
            needed.append(shape.state_bytes + total_bytes(needs, kept) // block_size)
    one_group = shape.token_bytes * -(-context // block_size) * block_size

    def fit(seqs: int, length: int) -> bool:
        blocks = divide(max(0, 10 * one_group - seqs * shape.slot_bytes), needs, context, MAX_NUM_SEQS)
        return all(count >= seqs * need.held(length) for need, count in zip(needs, blocks, strict=True))

    def sequences(length: int) -> int:
        return most(MAX_NUM_SEQS, lambda seqs: fit(seqs, length))

    mean = len(held) * GIB
    return GroupsReport(
        model, context, sum(needed) / mean, sum(held) / mean, one_group / GIB,
        sequences(context), sequences(context // 8),
    )  # fmt: skip


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


def show_groups(reports: list[GroupsReport], block_size: int) -> None:
    table = make_table(
        "", "needed", "held", "above need", "held in one tensor", "sequences", "of an eighth", "in one tensor"
    )
    for report in reports:
        table.add_row(
            report.model, f"{report.needed_gib:.3f} GiB", f"{report.held_gib:.3f} GiB",
            f"{report.held_gib / report.needed_gib - 1:.1%}", f"{report.one_group_gib:.3f} GiB",
            str(report.sequences), str(report.short_sequences), "10 and 80",
        )  # fmt: skip
    show(f"KV and states of one sequence of {reports[0].context} tokens, blocks of {block_size}", table)


def main(
    requests: Annotated[int, typer.Option(min=1, help="How many requests to run.")] = 1000,
    mean_prompt: Annotated[float, typer.Option(min=1, help="Tokens; log-normal.")] = 1155,
    mean_output: Annotated[float, typer.Option(min=1, help="Tokens; log-normal.")] = 211,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per KV block.")] = 16,
    max_model_len: Annotated[int, typer.Option(min=2, help="The context; what reserving would reserve.")] = 4096,
    context: Annotated[int, typer.Option(min=4096, help="Tokens of a sequence of models whose layers differ.")] = 32768,
    as_json: JsonOption = False,
) -> None:
    """Measure the KV memory that holds no token: paging against reserving the longest possible sequence, and layers
    that each keep what they need against one tensor for all.

    Example: python -m benchmarks.memory --mean-prompt 200 --mean-output 100
    """
    report = measure(
        requests=requests, mean_prompt=mean_prompt, mean_output=mean_output, block_size=block_size,
        max_model_len=max_model_len, progress=sys.stderr.isatty(),
    )  # fmt: skip
    groups = [measure_groups(model, context, block_size) for model in SHAPES]
    if as_json:
        print_json({**asdict(report), "groups": [asdict(group) for group in groups]})
    else:
        show_report(report, block_size, max_model_len)
        show_groups(groups, block_size)


if __name__ == "__main__":
    run(main)
