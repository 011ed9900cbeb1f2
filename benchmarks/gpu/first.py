"""The parts of `make first-gpu`: what to know about a card in the first eight minutes, in the order of its worth."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import parts
from benchmarks.gpu.card import Card
from benchmarks.gpu.engines import engine, shape_config, write_shape
from benchmarks.gpu.meta_steps import MetaModel
from benchmarks.gpu.parts import PARTS, Numbers, Part, decode, decode_steps, pytest, start_decoding
from cluster.cli.check.gpu_kernels import tried as kernels_tried
from engine.config import EngineConfig
from engine.kernel_trial.check import trial_config
from engine.kernel_trial.environment import environment
from engine.kernel_trial.reduced_model import reduced
from engine.model.ops.gpu.compile_target import Variant
from engine.offline.precompile import compile_all, needed

FIRST_S = 480
BATCHES = (1, 64, 256)  # of the one engine
KERNEL_PROCESSES, ENGINE_PROCESSES = 12, 6  # of tests
TRIED: dict[str, tuple[str, dict[str, Any]]] = {  # a shape, and options of its engine
    "8B": ("8B", {}),
    "8B in FP8": ("8B", parts.FP8),
    "8B with adapters": ("8B", {"enable_lora": True}),
    "30B-A3B": ("30B-A3B", {}),
    "DeepSeek V2 Lite": ("DeepSeek V2 Lite", {}),
    "Qwen3-Next": ("Qwen3-Next 80B-A3B", {}),
    "gpt-oss 20B": ("gpt-oss 20B", {}),
}


def compiled(card: Card) -> Numbers:
    """Compile the kernels of 8B and of all trials, in as many processes as there are cores. They stay in
    TRITON_CACHE_DIR."""
    capability = torch.cuda.get_device_capability()
    return {"kernels": compile_all(each_once(kernels(capability)), capability)}


def kernels(capability: tuple[int, int]) -> dict[str, list[Variant]]:
    """Return what the trials of TRIED, by name, and "8B engine" compile on a GPU of this compute capability."""
    config = EngineConfig(model="8B", block_size=64, max_num_batched_tokens=parts.PROMPT, max_num_seqs=max(BATCHES))
    found = {"8B engine": needed(config, reduced(shape_config("8B")), capability)}
    for name, (shape, options) in TRIED.items():
        model = reduced(shape_config(shape, options.get("quantization")))
        config = trial_config(EngineConfig(model=shape, device="cuda", **options))
        found[name] = needed(config, model, capability)
    return found


def each_once(found: dict[str, list[Variant]]) -> list[Variant]:
    return list({variant.key: variant for variants in found.values() for variant in variants}.values())


def tried(card: Card) -> Iterator[Numbers]:
    """Compare our kernels with plain torch, with the shapes of well-known models. Yields how many of each are right,
    and says on stderr which are not."""
    print(environment(), file=sys.stderr)
    for name, (shape, options) in TRIED.items():
        with tempfile.TemporaryDirectory() as folder:
            write_shape(shape, Path(folder))
            verdicts = kernels_tried(folder, options)
        for verdict in verdicts:
            found = f"{verdict.wrong or 'right'}, largest error {verdict.error:.2%}"
            print(f"{name}: {verdict.op}: {found}", file=sys.stderr)
        yield {f"right of {len(verdicts)} kernels, {name}": sum(not verdict.wrong for verdict in verdicts)}


def one_engine(card: Card) -> Iterator[Numbers]:
    """Measure one engine of 8B: steps of BATCHES sequences, the kernels of these steps, and a prompt."""
    settings = {"max_num_seqs": max(BATCHES), "max_num_batched_tokens": parts.PROMPT, "max_model_len": parts.MODEL_LEN}
    model = MetaModel(shape_config("8B"))
    weights = {size: model.weight_bytes(size) for size in BATCHES}
    with engine("8B", enable_prefix_caching=False, **settings) as run:
        for size in BATCHES:
            start_decoding(run, size, parts.WARM_STEPS + parts.STEPS + parts.PROFILED_STEPS + size)
            yield named(decode_steps(card, run, size, weights[size]), f"batch {size}")
            print(f"kernels of a step of batch {size}:", file=sys.stderr)
            yield named(parts.profiled_steps(run), f"profiled, batch {size}")
            run.until(lambda: False)
        yield named(parts.prompt_steps(card, run), f"prompt of {parts.PROMPT}")


def named(numbers: Numbers, of: str) -> Numbers:
    return {f"{unit}, {of}": value for unit, value in numbers.items()}


def of_bench(name: str) -> Part:
    """Return a part of `make bench-gpu`."""
    return next(part for part in PARTS if part.name == name)


FIRST = (
    Part("requirements", 30, command=("-m", "tests.gpu.requirements")),
    Part("kernels compiled", 60, compiled),
    Part("kernels against plain torch, at real shapes", 90, tried),
    of_bench("copy"),
    of_bench("matrix product, bf16"),
    Part("8B, one engine", 150, one_engine),
    Part("tests of kernels", 150, command=pytest(
        KERNEL_PROCESSES, "tests/engine/model/ops/gpu", "--ignore=tests/engine/model/ops/gpu/test_compile.py",
        "--ignore=tests/engine/model/ops/gpu/test_bandwidth.py",
    )),
    Part("tests of engines", 150, command=pytest(
        ENGINE_PROCESSES, "tests/gpu", "-k", "bundled or graphs or waits or overlap or preempted or experts or kv"
    )),
    Part("decode 30B-A3B, batch 64", 60, lambda card: decode(card, 64, "30B-A3B", max_model_len=parts.PROMPT)),
)  # fmt: skip
