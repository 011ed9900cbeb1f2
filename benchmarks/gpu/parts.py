"""The parts of `make bench-gpu`, each a process of its own, in the order in which they are worth having."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import quantized_linear
from benchmarks.gpu.card import (
    MATRIX,
    REPEATS,
    Card,
    copy_rate,
    device_seconds,
    graph_seconds,
    linear_parameters,
    matrix_rate,
    prompt_flops,
    step_bytes,
)
from benchmarks.gpu.engines import Decoding, engine, shape_config, write_shape
from benchmarks.gpu.meta_steps import MetaModel
from benchmarks.memory_floor import kv_bytes
from cluster.cli.bench.prompts import FIRST_ID
from engine.model.batch import Batch, split
from engine.model.ops import attention
from engine.model.ops.gpu.libraries import attention as library_attention
from engine.model.ops.gpu.libraries import choice
from engine.model.quantization.weight import FP8 as FLOAT8
from engine.spec_decode.draft_length import SequenceDrafts, StepDrafts
from engine.spec_decode.ngram import NgramSequence
from engine.wire.parts.speculation import SpecDecodeStats

DEVICE = "cuda"
FP8: dict[str, Any] = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
CONTEXT, WARM_STEPS, STEPS = 1024, 12, 64
PROMPT = 8192
LONG, MODEL_LEN = 100_000, 131_072
PROFILED_STEPS, TOP_KERNELS = 16, 12
STREAMS, ARRIVALS, ARRIVING_PROMPT, EVERY_STEPS = 64, 48, 512, 4
CONTEXTS = (1024, 32_768, 131_072)  # of the sweep of attention
ATTENTION_SEQS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 32, 8, 128, 64
# names and values in engine/model/ops/gpu/attention.py, beside those that are there
ATTENTION_CONSTANTS: tuple[dict[str, Any], ...] = (
    {}, {"NUM_STAGES": 3}, {"NUM_STAGES": 4}, {"NUM_STAGES": 6}, {"KEY_TILE_BYTES": 8192}, {"KEY_TILE_BYTES": 32768},
    {"PROGRAMS_PER_PROCESSOR": 2}, {"PROGRAMS_PER_PROCESSOR": 8},
)  # fmt: skip
LINEAR_ROWS = (1, 16, 64, 256, 1024)
IMAGE_EMBEDS, IMAGES = 1024, 12  # a megapixel has 1,300
DRAFTS = 3
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 8, "max_lora_rank": 16}
NANO_SEQS, NANO_LENGTHS = 256, (100, 1024)

Numbers = dict[str, float]


def copy(card: Card) -> Numbers:
    return copy_rate(DEVICE)


def matrix(card: Card) -> Numbers:
    return matrix_rate(DEVICE)


def decode(
    card: Card, batch_size: int, shape: str = "8B", longest: int = 0, sampling: dict[str, Any] | None = None,
    **options: Any,
) -> Numbers:  # fmt: skip
    """Measure steps of `batch_size` sequences behind CONTEXT tokens and a little more, at the longest context that the
    model has. longest: tokens of the first one. sampling: greedy without it."""
    weights = MetaModel(shape_config(shape, options.get("quantization"))).weight_bytes(batch_size)
    with decoding(batch_size, shape, longest, sampling, **options) as run:
        return decode_steps(card, run, batch_size, weights)


def decode_steps(card: Card, run: Decoding, batch_size: int, weight_bytes: float) -> Numbers:
    """Measure STEPS steps of an engine whose sequences all decode. weight_bytes: of the weights that a step reads."""
    steps, waited, started = run.steps, run.waited_s, time.perf_counter()
    lengths = [length + STEPS // 2 for length in run.lengths()]
    run.until(lambda: run.steps >= steps + STEPS)
    seconds = (time.perf_counter() - started) / STEPS
    host = 1 - (run.waited_s - waited) / STEPS / seconds
    assert len(lengths) == batch_size, "not all sequences decode"
    floor = step_bytes(run.config, weight_bytes, run.core.ranks.runner.kv_caches[0].dtype, lengths) / card.bytes_per_s
    return {
        "ms/step": 1e3 * seconds,
        "floor ms": 1e3 * floor,
        "% of floor rate": 100 * floor / seconds,
        "tokens/s": batch_size / seconds,
        "host busy %": 100 * host,
    }


@contextmanager
def decoding(
    batch_size: int, shape: str, longest: int, sampling: dict[str, Any] | None, **options: Any
) -> Iterator[Decoding]:
    """An engine whose sequences all decode, and whose kernels are warm."""
    settings = {"max_num_seqs": batch_size, "max_num_batched_tokens": PROMPT, "max_model_len": MODEL_LEN, **options}
    with engine(shape, **settings) as run:
        start_decoding(run, batch_size, 8 * (WARM_STEPS + STEPS), longest, **(sampling or {}))
        yield run


def start_decoding(run: Decoding, batch_size: int, max_tokens: int, longest: int = 0, **sampling: Any) -> None:
    """Add sequences, and run the engine until all of them decode and its kernels are warm."""
    for i in range(batch_size):
        run.add(f"{batch_size} {i}", (i == 0 and longest) or CONTEXT, max_tokens, **sampling)
    run.until(lambda: all(request.num_output for request in run.core.scheduler.queue.live.values()))
    warm = run.steps + WARM_STEPS
    run.until(lambda: run.steps >= warm)


def profiled(card: Card, batch_size: int, shape: str = "8B") -> Numbers:
    """Say where a decode step's time goes: kernels by name on stderr, and launches, device time and gaps per step."""
    with decoding(batch_size, shape, 0, None) as run:
        return profiled_steps(run)


def profiled_steps(run: Decoding) -> Numbers:
    """Profile PROFILED_STEPS steps; see `profiled`."""
    with profile(activities=list(activities())) as found:
        started, steps = time.perf_counter(), run.steps
        run.until(lambda: run.steps >= steps + PROFILED_STEPS)
        torch.cuda.synchronize()
        seconds, steps = time.perf_counter() - started, run.steps - steps
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in found.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name][0] += 1 / steps
            kernels[event.name][1] += event.self_device_time_total / steps
    for name, (calls, us) in sorted(kernels.items(), key=lambda kernel: -kernel[1][1])[:TOP_KERNELS]:
        print(f"{us:9.1f} us {calls:7.1f} x  {name[:100]}", file=sys.stderr)
    busy = sum(us for _, us in kernels.values())
    return {
        "launches/step": sum(calls for calls, _ in kernels.values()),
        "device ms/step": busy / 1e3,
        "ms/step": 1e3 * seconds / steps,
        "% gaps": 100 * (1 - busy / 1e6 / (seconds / steps)),
    }


def activities() -> Iterator[ProfilerActivity]:
    yield ProfilerActivity.CPU
    if torch.cuda.is_available():
        yield ProfilerActivity.CUDA


def prefill(card: Card, **options: Any) -> Numbers:
    """Measure one prompt of PROMPT tokens in one step: the fastest of three, after one that compiles kernels."""
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": PROMPT, "max_model_len": PROMPT + 16, **options}
    with engine("8B", enable_prefix_caching=False, **settings) as run:
        return prompt_steps(card, run)


def prompt_steps(card: Card, run: Decoding) -> Numbers:
    """Measure a prompt of PROMPT tokens in an engine that does nothing else; see `prefill`."""
    seconds = []
    for i in range(4):
        run.add(f"prompt {i}", PROMPT, 1)
        started = time.perf_counter()
        run.until(lambda: False)
        seconds.append(time.perf_counter() - started)
    best, flops = min(seconds[1:]), prompt_flops(run.config, PROMPT)
    return {
        "ms": 1e3 * best,
        "tokens/s": PROMPT / best,
        "TFLOP/s": flops / best / 1e12,
        "% of matrix rate": 100 * flops / best / card.flops,
    }


def nano_vllm(card: Card) -> Numbers:
    """Run the benchmark of nano-vLLM's README: 256 sequences, 100 to 1024 tokens in and out, temperature 0.6."""
    rng = random.Random(0)
    sizes = [(rng.randint(*NANO_LENGTHS), rng.randint(*NANO_LENGTHS)) for _ in range(NANO_SEQS)]
    options = {"max_num_seqs": NANO_SEQS, "max_num_batched_tokens": 2 * PROMPT, "max_model_len": 4 * NANO_LENGTHS[1]}
    with engine("0.6B", **options) as run:
        for i, (prompt_len, output_len) in enumerate(sizes):
            run.add(str(i), prompt_len, output_len, temperature=0.6)
        started = time.perf_counter()
        run.until(lambda: False)
        seconds = time.perf_counter() - started
        host, steps, config = 1 - run.waited_s / seconds, run.steps, run.config
    outputs = sum(output for _, output in sizes)
    lengths = [prompt + i for prompt, output in sizes for i in range(output)]
    read = steps * MetaModel(shape_config("0.6B")).weight_bytes(1) + kv_bytes(config, torch.bfloat16, lengths)
    compute = 2 * linear_parameters(config) * sum(prompt for prompt, _ in sizes)
    floor = read / card.bytes_per_s + compute / card.flops
    return {
        "output tokens/s": outputs / seconds,
        "seconds": seconds,
        "steps": steps,
        "ms/step": 1e3 * seconds / steps,
        "floor s": floor,
        "% of floor rate": 100 * floor / seconds,
        "host busy %": 100 * host,
    }


def arrivals(card: Card) -> Numbers:
    """STREAMS streams at the model's own length, to which a prompt of ARRIVING_PROMPT tokens comes every few steps:
    how long their steps are then."""
    with decoding(STREAMS, "8B", 0, None, max_num_seqs=STREAMS + ARRIVALS, max_num_batched_tokens=512) as run:
        run.step_ends.clear()
        for i in range(ARRIVALS):
            run.add(f"arrival {i}", ARRIVING_PROMPT, 2)
            steps = run.steps + EVERY_STEPS
            run.until(lambda: run.steps >= steps)  # noqa: B023 - called here
        ends = run.step_ends
    gaps = sorted(1e3 * (end - begin) for begin, end in pairwise(ends))
    return {f"p{percent} ms": gaps[len(gaps) * percent // 100] for percent in (50, 95, 99)}


def images(card: Card) -> Numbers:
    """STREAMS streams, to which a prompt with an image comes every few steps: how long their steps are then."""
    options = {"max_num_seqs": STREAMS + IMAGES, "max_num_batched_tokens": PROMPT, "max_model_len": PROMPT}
    with decoding(STREAMS, "Qwen2.5-VL 7B", 0, None, **options) as run:
        run.step_ends.clear()
        for i in range(IMAGES):
            run.add(f"image {i}", 16, 2, image_embeds=IMAGE_EMBEDS)
            steps = run.steps + EVERY_STEPS
            run.until(lambda: run.steps >= steps)  # noqa: B023 - called here
        ends = run.step_ends
    gaps = sorted(1e3 * (end - begin) for begin, end in pairwise(ends))
    return {"p50 ms": gaps[len(gaps) // 2], "longest ms": gaps[-1]}


def drafts(card: Card, batch_size: int, head: str | None = None) -> Numbers:
    """Steps that verify DRAFTS drafts of every sequence, however they fare; see the same part without drafts. head: the
    shape of an EAGLE-3 head that drafts them, else they are looked up."""
    with tempfile.TemporaryDirectory() as folder, drafting_always():
        speculative = {"method": "ngram", "num_speculative_tokens": DRAFTS}
        if head is not None:
            write_shape(head, Path(folder))
            speculative |= {"method": "eagle3", "model": folder}
        return verifying(batch_size, {"speculative_config": speculative, "max_num_seqs": batch_size})


def verifying(batch_size: int, options: dict[str, Any]) -> Numbers:
    with decoding(batch_size, "8B", 0, None, **options) as run:
        before, started = run.steps, time.perf_counter()
        drafted = num_drafts(run)
        run.until(lambda: run.steps >= before + STEPS)
        seconds = (time.perf_counter() - started) / STEPS
        drafted = num_drafts(run) - drafted
    return {"ms/step": 1e3 * seconds, "drafts/step": drafted / STEPS}


def num_drafts(run: Decoding) -> int:
    stats = run.core.stats().record(SpecDecodeStats)
    return 0 if stats is None else stats.num_draft_tokens


@contextmanager
def drafting_always() -> Iterator[None]:
    """Propose as many tokens as there may be, all the same, whatever they cost."""
    with ExitStack() as stack:
        for owner, name, stand_in in (
            (NgramSequence, "propose", lambda sequence, limit: [FIRST_ID] * limit),
            (StepDrafts, "_least", lambda step: -1.0),
            (StepDrafts, "length", lambda step, acceptance, limit: limit),
            (StepDrafts, "proposals", lambda step, acceptances, limit: limit),
            (SequenceDrafts, "untried", False),
            (SequenceDrafts, "pause", lambda drafts, length: None),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


def without_libraries(card: Card) -> Numbers:
    with mock.patch.object(library_attention, "OP", library_attention.OP._replace(libraries=())):
        return decode(card, 64)


def libraries(card: Card) -> Numbers:
    """us of one layer's attention by each library that is installed, and by ours, for the batches of its trial."""
    op, device = library_attention.OP, torch.device(DEVICE)
    shape = choice.AttentionShape(torch.bfloat16, HEADS, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    candidates = {library.name: choice.load(op, library, device) for library in op.libraries}
    names = [f"{len(lengths)} of {lengths[-1]}, longest {lengths[0]}" for lengths in choice.TIMED]
    return {
        f"us {name}, {batch}": 1e6 * seconds
        for name, attend in {**candidates, "ours": op.ours}.items()
        if attend is not None
        for batch, seconds in zip(names, choice.seconds(attend, shape, device), strict=True)
    }


def sweep_attention(card: Card) -> Numbers:
    """GB/s of the attention of decode steps by our kernel, by length, as it is and with other constants."""
    from engine.model.ops.gpu import attention as triton_attention

    numbers, ops = {}, attention.select(torch.bfloat16, torch.device(DEVICE))
    for context in CONTEXTS:
        q, batch = attention_batch(context)
        read = 2 * ATTENTION_SEQS * context * KV_HEADS * HEAD_DIM * q.element_size()
        for constants in ATTENTION_CONSTANTS:
            with mock.patch.multiple(triton_attention, **constants) if constants else mock.patch.dict({}):
                batch.plans.clear()
                name = f"{context // 1024}k" + "".join(f" {key}={value}" for key, value in constants.items())
                try:
                    seconds = graph_seconds(lambda: ops.paged_attention(q, batch, 0, 0.1))  # noqa: B023
                except Exception as error:  # noqa: BLE001 - some tiles need more shared memory than there is
                    print(f"{name}: {error}", file=sys.stderr)
                    continue
            numbers[f"GB/s at {name}"] = read / seconds / 1e9
    return numbers


def attention_batch(context: int) -> tuple[torch.Tensor, Batch]:
    """q and the batch of ATTENTION_SEQS sequences that decode behind `context` tokens."""
    width = -(-context // BLOCK_SIZE)
    cache = torch.randn(ATTENTION_SEQS * width, 1, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, device=DEVICE).bfloat16()
    single, chunks = split([1] * ATTENTION_SEQS, [context] * ATTENTION_SEQS)
    batch = Batch(
        positions=torch.full((ATTENTION_SEQS,), context - 1, device=DEVICE),
        slot_mapping=torch.full((ATTENTION_SEQS,), -1, device=DEVICE),
        query_start=torch.arange(ATTENTION_SEQS + 1, dtype=torch.int32, device=DEVICE),
        kv_len=torch.full((ATTENTION_SEQS,), context, dtype=torch.int32, device=DEVICE),
        block_table=torch.randperm(len(cache), device=DEVICE).int().view(ATTENTION_SEQS, width),
        kv_cache=cache,
        single=single.to(DEVICE),
        chunks=chunks,
    )
    return torch.randn(ATTENTION_SEQS, HEADS, HEAD_DIM, device=DEVICE).bfloat16(), batch


def fast_accumulation(card: Card) -> Numbers:
    """TFLOP/s of a product in float8 with a scale per row, with fast accumulation and without."""
    a, b = (torch.randn(MATRIX, MATRIX, device=DEVICE).to(FLOAT8) for _ in range(2))
    scale = torch.ones(MATRIX, 1, device=DEVICE)

    def product(fast: bool) -> torch.Tensor:
        return torch._scaled_mm(a, b.T, scale, scale.T, out_dtype=torch.bfloat16, use_fast_accum=fast)

    flops = 2 * MATRIX**3
    return {
        f"TFLOP/s {name}": flops / device_seconds(lambda: product(fast)) / 1e12  # noqa: B023 - called here
        for name, fast in (("fast", True), ("exact", False))
    }


def linears(card: Card) -> Numbers:
    """µs of a layer's four products, by what its weights are stored in, in CUDA graphs."""
    numbers = {}
    with torch.inference_mode(), torch.device(DEVICE):
        for name, quantize in quantized_linear.KINDS.items():
            layer = quantized_linear.make_layer(quantized_linear.SHAPES["8B"], quantize)
            for rows in LINEAR_ROWS:
                inputs = {size: torch.randn(rows, size).bfloat16() for size, _ in layer}

                def run() -> None:
                    for size, multiply in layer:  # noqa: B023 - called here
                        multiply(inputs[size])  # noqa: B023

                numbers[f"us {name}, {rows} rows"] = 1e6 * graph_seconds(run, REPEATS)
    return numbers


@dataclass(frozen=True, slots=True)
class Part:
    """A row of the table: something to measure, or a command to run, whose tests are counted."""

    name: str
    limit_s: int
    measure: Callable[[Card], Numbers | Iterator[Numbers]] | None = None
    """Returns its numbers, or yields them one after another: what it has yielded stays if it is ended."""
    command: tuple[str, ...] = ()
    gpus: int = 1


def pytest(processes: int, *chosen: str) -> tuple[str, ...]:
    spread = ("-n", str(processes)) if processes > 1 and find_spec("xdist") is not None else ()
    return ("-m", "pytest", *chosen, "-o", "timeout_method=thread", "-o", "filterwarnings=", "-q", "-rf", *spread)


SANITIZER = "first failing test under compute-sanitizer"
ENGINE_TESTS = "graphs or waits or overlap or preempted or experts or padding"
PARTS = (
    Part("requirements", 60, command=("-m", "tests.gpu.requirements")),
    Part("the bundled model in bfloat16", 120, command=pytest(1, "tests/gpu/test_engine.py", "-k", "bundled")),
    Part("kernels against torch", 240, command=pytest(
        8, "tests/engine/model/ops/gpu", "--ignore=tests/engine/model/ops/gpu/test_compile.py"
    )),
    Part("graphs, waits, overlap, preemption", 150, command=pytest(
        4, "tests/gpu/test_engine.py", "-k", ENGINE_TESTS
    )),
    Part("copy", 40, copy),
    Part("matrix product, bf16", 40, matrix),
    Part("decode 8B, batch 1", 120, lambda card: decode(card, 1)),
    Part("decode 8B, batch 64", 90, lambda card: decode(card, 64)),
    Part("prefill 8B, 8192 tokens", 90, prefill),
    Part("profile 8B, batch 1", 90, lambda card: profiled(card, 1)),
    Part("profile 8B, batch 64", 90, lambda card: profiled(card, 64)),
    Part("decode 8B, batch 64, top_p", 90, lambda card: decode(card, 64, sampling={"temperature": 1.0, "top_p": 0.9})),
    Part("decode 8B, batch 64, top_k", 90, lambda card: decode(card, 64, sampling={"temperature": 1.0, "top_k": 20})),
    # what follows is worth having once the parts above have decided that it all works
    Part(SANITIZER, 150),
    Part("attention libraries", 90, libraries),
    Part("decode 8B, batch 64, our attention", 90, without_libraries),
    Part("decode 8B, one of 100k among 63 of 1k", 120, lambda card: decode(card, 64, longest=LONG)),
    Part("decode 8B, batch 1, drafts", 90, lambda card: drafts(card, 1)),
    Part("decode 8B, batch 64, drafts", 90, lambda card: drafts(card, 64)),
    Part("decode 8B, batch 1, drafts by EAGLE-3", 90, lambda card: drafts(card, 1, "EAGLE-3 for 8B")),
    Part("decode 8B, batch 64, drafts by EAGLE-3", 90, lambda card: drafts(card, 64, "EAGLE-3 for 8B")),
    Part("64 streams and arriving images, 7B", 120, images),
    Part("decode 8B, batch 64, adapters enabled and none in the batch", 90, lambda card: decode(card, 64, **LORA)),
    Part("decode Qwen3-Next, 8 layers, batch 64", 120, lambda card: decode(
        card, 64, "Qwen3-Next, 8 layers", max_model_len=PROMPT
    )),
    Part("decode DeepSeek V2 Lite, batch 64", 120, lambda card: decode(
        card, 64, "DeepSeek V2 Lite", max_model_len=PROMPT
    )),
    Part("attention, GB/s", 120, sweep_attention),
    Part("decode 8B, batch 1, fp8", 90, lambda card: decode(card, 1, **FP8)),
    Part("decode 8B, batch 64, fp8", 90, lambda card: decode(card, 64, **FP8)),
    Part("prefill 8B, 8192 tokens, fp8", 90, lambda card: prefill(card, **FP8)),
    Part("fp8 products", 40, fast_accumulation),
    Part("quantized linear layers", 120, linears),
    Part("decode 30B-A3B, batch 1", 120, lambda card: decode(card, 1, "30B-A3B", max_model_len=PROMPT)),
    Part("decode 30B-A3B, batch 64", 120, lambda card: decode(card, 64, "30B-A3B", max_model_len=PROMPT)),
    Part("decode 30B-A3B, batch 64, fp8", 120, lambda card: decode(card, 64, "30B-A3B", max_model_len=PROMPT, **FP8)),
    Part("decode gpt-oss 20B, batch 64", 120, lambda card: decode(card, 64, "gpt-oss 20B", max_model_len=PROMPT)),
    Part("decode 0.6B, batch 256", 90, lambda card: decode(card, 256, "0.6B", max_model_len=PROMPT)),
    Part("64 streams and arriving prompts, 8B", 90, arrivals),
    Part("nano-vLLM's benchmark, 0.6B", 120, nano_vllm),
    Part("decode 8B, batch 1, without graphs", 90, lambda card: decode(card, 1, enforce_eager=True)),
    Part("the rest of the tests", 400, command=pytest(4, "tests/gpu")),
    Part("two GPUs: tokens, the end, a rank that is killed", 240, command=pytest(1, "tests/gpu/test_ranks.py"), gpus=2),
    Part("prefill 8B, 8192 tokens, torch.compile", 150, lambda card: prefill(card, torch_compile=True)),
    Part("decode 8B, batch 64, torch.compile", 150, lambda card: decode(card, 64, torch_compile=True)),
)  # fmt: skip
