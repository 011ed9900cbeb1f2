"""Speed of the engine on a GPU, against the rates of the card itself: `make bench-gpu`.

    python -m benchmarks.gpu --out build/gpu

Needs neither Ray nor weights nor a network: models have the shapes of well-known ones and random weights. Each part
says when it starts, has a time limit, and fails alone: after an error that leaves the card of no use to the process,
such as an illegal memory access, a new process goes on with the next part. The results go to stdout, gpu.json and
gpu.md in `--out`.

Floors: a decode step has to read all weights and the KV of its sequences once; at the rate at which the card copies
memory (bytes read plus bytes written), that takes the floor. A prompt has to be multiplied with the weights; at the
rate of a large bfloat16 matrix product, that takes its floor.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory_floor import kv_bytes
from cluster.cli.bench.prompts import FIRST_ID
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.model.config import ModelConfig
from engine.wire.messages import GenerateRequest
from engine.wire.sampling_params import SamplingParams

SHAPES: dict[str, dict[str, Any]] = {
    "8B": {  # Llama 3.1 8B
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 32768, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    "0.6B": {  # Qwen3 0.6B
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    },
}  # fmt: skip
FP8: dict[str, Any] = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
COPY_BYTES = 2**32
MATRIX = 8192
REPEATS = 10
CONTEXT, WARM_STEPS, STEPS = 1024, 12, 64
PROMPT = 8192
LIMIT_S = 150  # of one part


@dataclass(slots=True)
class Part:
    """A row of the report."""

    name: str
    seconds: float = 0.0
    numbers: dict[str, float] = field(default_factory=dict)  #: by unit
    problem: str | None = None  #: the reason that there are no numbers


@dataclass(slots=True)
class Card:
    bytes_per_s: float = 0.0  #: read plus written, while a large tensor is copied
    flops: float = 0.0  #: per second, in a product of two large bfloat16 matrices


class Decoding:
    """An engine with random weights, whose steps are timed as they follow each other in practice: with overlap, so that
    the host works beside the card."""

    def __init__(self, shape: str, **options: Any):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]), encoding="utf-8")
            defaults = {"load_format": "dummy", "max_num_batched_tokens": PROMPT}
            self.core = EngineCore.build(EngineConfig(model=folder, device="cuda", **{**defaults, **options}))
        self.config: ModelConfig = self.core.model_config
        self.waited_s = 0.0
        self.steps = 0
        collect = self.core.runner.collect

        def timed(launched: Any) -> Any:
            started = time.perf_counter()
            launched.event.wait()
            self.waited_s += time.perf_counter() - started
            self.steps += 1
            return collect(launched)

        self.core.runner.collect = timed  # type: ignore[method-assign]

    def add(self, name: str, prompt_len: int, max_tokens: int, temperature: float = 0.0, top_p: float = 1.0) -> None:
        rng = random.Random(name)
        prompt = [rng.randrange(FIRST_ID, self.config.vocab_size) for _ in range(prompt_len)]
        seed = rng.randrange(2**31)
        params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, ignore_eos=True, seed=seed)
        self.core.add(GenerateRequest(request_id=name, prompt=prompt, params=params))

    def until(self, done: Callable[[], bool]) -> list[Any]:
        events = []
        while self.core.has_work and not done():
            events += self.core.step()
        return events

    def end(self) -> None:
        self.core.close()
        del self.core
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def engine(shape: str, **options: Any) -> Iterator[Decoding]:
    decoding = Decoding(shape, **options)
    try:
        yield decoding
    finally:
        decoding.end()


def device_seconds(run: Callable[[], Any]) -> float:
    """Time the fastest of REPEATS runs, by the card's clock."""
    run()
    best = float("inf")
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best


def copy_rate(card: Card) -> dict[str, float]:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    card.bytes_per_s = 2 * COPY_BYTES / device_seconds(lambda: target.copy_(source))
    return {"GB/s": card.bytes_per_s / 1e9}


def matrix_rate(card: Card) -> dict[str, float]:
    a, b = (torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    card.flops = 2 * MATRIX**3 / device_seconds(lambda: a @ b)
    return {"TFLOP/s": card.flops / 1e12}


def decode(card: Card, batch_size: int, top_p: float | None = None, **options: Any) -> dict[str, float]:
    """Measure steps of `batch_size` sequences behind CONTEXT tokens and a little more; greedy without a top_p."""
    max_model_len = -(-(CONTEXT + 4 * (WARM_STEPS + STEPS)) // 16) * 16
    with engine("8B", max_num_seqs=batch_size, max_model_len=max_model_len, **options) as run:
        for i in range(batch_size):
            run.add(str(i), CONTEXT, max_model_len - CONTEXT, 0.0 if top_p is None else 1.0, top_p or 1.0)
        prompts = -(-batch_size * CONTEXT // PROMPT)
        run.until(lambda: run.steps >= prompts + WARM_STEPS)
        steps, waited, started = run.steps, run.waited_s, time.perf_counter()
        lengths = [len(request.tokens) + STEPS // 2 for request in run.core.scheduler.queue.running]
        run.until(lambda: run.steps >= steps + STEPS)
        seconds = (time.perf_counter() - started) / STEPS
        host = 1 - (run.waited_s - waited) / STEPS / seconds
        kv_dtype, config = run.core.runner.kv_cache.dtype, run.config
    assert len(lengths) == batch_size, "not all sequences decode"
    weights = matrix_bytes(config, 1 if options.get("quantization") else 2)
    floor = (weights + kv_bytes(config, kv_dtype, lengths)) / card.bytes_per_s
    return {
        "ms/step": 1e3 * seconds,
        "floor ms": 1e3 * floor,
        "% of floor rate": 100 * floor / seconds,
        "tokens/s": batch_size / seconds,
        "host busy %": 100 * host,
    }


def matrix_bytes(config: ModelConfig, bytes_each: int) -> int:
    """Return the bytes of all weights that a step reads: the layers' matrices, and the head in bfloat16."""
    return linear_parameters(config) * bytes_each + config.vocab_size * config.hidden_size * 2


def linear_parameters(config: ModelConfig) -> int:
    heads = config.num_heads + 2 * config.num_kv_heads
    attention = config.hidden_size * config.head_dim * (heads + config.num_heads)
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def prefill(card: Card, **options: Any) -> dict[str, float]:
    """Measure one prompt of PROMPT tokens in one step: the fastest of three, after one that compiles kernels."""
    with engine("8B", max_num_seqs=4, max_model_len=PROMPT + 16, enable_prefix_caching=False, **options) as run:
        seconds = []
        for i in range(4):
            run.add(f"prompt {i}", PROMPT, 1)
            started = time.perf_counter()
            run.until(lambda: False)
            seconds.append(time.perf_counter() - started)
        config = run.config
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * PROMPT**2  # causal: half of 4 h d T^2
    flops = 2 * linear_parameters(config) * PROMPT + attention
    best = min(seconds[1:])
    return {
        "ms": 1e3 * best,
        "tokens/s": PROMPT / best,
        "TFLOP/s": flops / best / 1e12,
        "% of matrix rate": 100 * flops / best / card.flops,
    }


def nano_vllm(card: Card) -> dict[str, float]:
    """Run the benchmark of nano-vLLM's README: 256 sequences, 100 to 1024 tokens in and out, temperature 0.6."""
    rng = random.Random(0)
    sizes = [(rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(256)]
    with engine("0.6B", max_num_seqs=256, max_num_batched_tokens=16384, max_model_len=4096) as run:
        # Kernels are compiled, and all batch sizes captured as graphs: none ends before the last prompt has been
        # computed, then few in each step, and the last ones one by one.
        for i, (prompt_len, _) in enumerate(sizes):
            run.add(f"warm {i}", prompt_len, 16 + i // 8 + max(0, i - 248), temperature=0.6)
        run.until(lambda: False)
        for i, (prompt_len, output_len) in enumerate(sizes):
            run.add(str(i), prompt_len, output_len, temperature=0.6)
        steps, waited, started = run.steps, run.waited_s, time.perf_counter()
        run.until(lambda: False)
        seconds = time.perf_counter() - started
        host, steps, config = 1 - (run.waited_s - waited) / seconds, run.steps - steps, run.config
    outputs = sum(output for _, output in sizes)
    lengths = [prompt + i for prompt, output in sizes for i in range(output)]
    read = steps * matrix_bytes(config, 2) + kv_bytes(config, torch.bfloat16, lengths)
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


def card_is_lost() -> bool:
    """Whether every further call of CUDA in this process fails."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def measure(name: str, run: Callable[[], dict[str, float]], limit_s: int, started: float) -> Part:
    print(f"[{time.monotonic() - started:4.0f} s] {name} ...", file=sys.stderr, flush=True)
    part = Part(name)
    began = time.monotonic()

    def late(*_: Any) -> None:
        raise TimeoutError(f"took more than {limit_s} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(limit_s)
    try:
        part.numbers = run()
    except Exception as error:  # noqa: BLE001 - the other parts are worth having
        why = str(error).partition("\n")[0]  # CUDA's errors go on with advice
        part.problem = f"{type(error).__name__}: {why}"
        traceback.print_exc()
    finally:
        signal.alarm(0)
    part.seconds = time.monotonic() - began
    if not card_is_lost():
        gc.collect()
        torch.cuda.empty_cache()
    values = ", ".join(f"{value:.4g} {unit}" for unit, value in part.numbers.items())
    print(f"[{time.monotonic() - started:4.0f} s] {name}: {part.problem or values}", file=sys.stderr, flush=True)
    return part


def table(parts: list[Part], device: str) -> str:
    lines = [f"{device}, torch {torch.__version__}", "", "| part | result | took |", "| --- | --- | --- |"]
    for part in parts:
        values = part.problem or ", ".join(f"{value:.4g} {unit}" for unit, value in part.numbers.items())
        lines.append(f"| {part.name} | {values} | {part.seconds:.0f} s |")
    return "\n".join(lines) + "\n"


def save(folder: Path, device: str, card: Card, parts: list[Part]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found = {"device": device, "torch": torch.__version__, "card": asdict(card), "parts": [asdict(p) for p in parts]}
    (folder / "gpu.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    (folder / "gpu.md").write_text(table(parts, device), encoding="utf-8")


def saved(folder: Path) -> tuple[Card, list[Part]]:
    found = json.loads((folder / "gpu.json").read_text(encoding="utf-8"))
    return Card(**found["card"]), [Part(**part) for part in found["parts"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder for gpu.json and gpu.md")
    parser.add_argument("--limit", type=int, default=540, help="seconds in all; what comes later is left out")
    parser.add_argument("--only", default="", help="parts whose names contain this, besides the card's own rates")
    parser.add_argument("--resume", action="store_true", help="go on after the parts that gpu.json has")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench-gpu: torch finds no GPU here, so there is nothing to measure", file=sys.stderr)
        return 1
    logging.basicConfig(format="%(name)s %(message)s", level=logging.INFO, stream=sys.stderr)
    card, parts = saved(given.out) if given.resume else (Card(), [])
    started, done = time.monotonic(), {part.name for part in parts}
    plan: list[tuple[str, Callable[[], dict[str, float]]]] = [
        ("copy", lambda: copy_rate(card)),
        ("matrix product, bf16", lambda: matrix_rate(card)),
        ("decode 8B, batch 1", lambda: decode(card, 1)),
        ("decode 8B, batch 64", lambda: decode(card, 64)),
        ("prefill 8B, 8192 tokens", lambda: prefill(card)),
        ("nano-vLLM's benchmark, 0.6B", lambda: nano_vllm(card)),
        ("decode 8B, batch 1, fp8", lambda: decode(card, 1, **FP8)),
        ("decode 8B, batch 64, fp8", lambda: decode(card, 64, **FP8)),
        ("prefill 8B, 8192 tokens, fp8", lambda: prefill(card, **FP8)),
        ("decode 8B, batch 64, top_p", lambda: decode(card, 64, top_p=0.9)),
        ("decode 8B, batch 1, without graphs", lambda: decode(card, 1, enforce_eager=True)),
        ("prefill 8B, 8192 tokens, torch.compile", lambda: prefill(card, torch_compile=True)),
        ("decode 8B, batch 64, torch.compile", lambda: decode(card, 64, torch_compile=True)),
        ("decode 8B, batch 1, torch.compile", lambda: decode(card, 1, torch_compile=True)),
    ]
    device = torch.cuda.get_device_name()
    for index, (name, run) in enumerate(plan):
        left = given.limit - (time.monotonic() - started)
        if name in done or (index > 1 and given.only not in name):
            continue
        if left < 20:
            parts.append(Part(name, problem=f"left out: the {given.limit} s are over"))
        else:
            parts.append(measure(name, run, min(LIMIT_S, int(left)), started))
        save(given.out, device, card, parts)  # after every part, so that a run that is cut off leaves what it has
        if parts[-1].problem and card_is_lost():
            left = max(0, int(given.limit - (time.monotonic() - started)))
            again = [*sys.argv[1:], "--resume", "--limit", str(left)]
            os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu", *again])
    print(table(parts, device))
    return 1 if any(part.problem for part in parts) else 0


if __name__ == "__main__":
    sys.exit(main())
