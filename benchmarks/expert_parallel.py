"""Whole experts on each rank against a slice of every expert: python -m benchmarks.expert_parallel

Prints tokens/s of a mixture of 64 narrow experts with random weights (64 experts of 384, 8 per token, hidden size 1024,
6 layers: 0.45 billion parameters), on one rank and on two with one thread each, and the share of the time in which each
rank waits. Waiting is the time in which a rank's process uses no CPU, so unequal shares mean unequal work.

    python -m benchmarks.expert_parallel --skewed

Compares whole experts that stay with whole experts that move, if routers prefer the experts that the first rank has at
first: the rows of these experts in routers' weights are larger. Prints tokens/s, and the mean load of a rank divided by
the maximum.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from engine.config import EngineConfig
from engine.core.door.inputs import CacheCleared
from engine.core.engine import EngineCore
from engine.model import noise
from engine.model.layers.moe import RouterProduct
from engine.model.noise import fill_with_noise
from engine.options.experts import EPLBConfig
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.experts import ExpertReport
from engine.wire.sampling_params import SamplingParams
from tests.models import make_model
from tests.rank_pool import RankPool

SHAPE: dict[str, Any] = {
    "hidden_size": 1024, "moe_intermediate_size": 384, "num_experts": 64, "num_experts_per_tok": 8, "head_dim": 64,
    "num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": 6, "mlp_only_layers": [],
    "vocab_size": 8192, "max_position_embeddings": 2048,
}  # fmt: skip
TOKENS = 48  # of each request that decodes
LOADS = {"1 request": (1, 0), "8 requests": (8, 0), "32 requests": (32, 0), "2 prompts of 1,000": (0, 2)}
SLICED: dict[str, Any] = {"tensor_parallel_size": 2}
WHOLE: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
LAYOUTS: list[dict[str, Any]] = [
    {},
    SLICED,
    WHOLE,
    *({**layout, "determinism": "strict"} for layout in (SLICED, WHOLE)),
]


def make_folder() -> Path:
    """Return a model folder whose config.json has SHAPE. Its weights are those of a smaller model, so it can only be
    loaded with random ones."""
    folder = make_model(Path(tempfile.mkdtemp()), "qwen3_moe")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | SHAPE))
    return folder


def compute(core: EngineCore, decoding: int, prompts: int) -> int:
    """Return the number of tokens computed."""
    for i in range(decoding + prompts):
        length, count = (8, TOKENS) if i < decoding else (1000, 1)
        prompt = torch.randint(3, 8192, (length,), generator=torch.Generator().manual_seed(i)).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        core.add(GenerateRequest(request_id=str(i), prompt=prompt, params=params))
    while core.has_work:
        core.step()
    core.apply(CacheCleared())
    return TOKENS * decoding + 1000 * prompts


def cpu_seconds(pids: list[int]) -> list[float]:
    """Return the CPU time that each process has used."""
    return [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]


PREFERRED, FACTOR = 16, 6.0  # experts that routers prefer, and by how much their rows are larger
WINDOW, ONCE = 40, 10**6  # steps of a window; an interval after which no run moves experts again
MOVING = {"enable_eplb": True, "eplb_config": EPLBConfig(window_size=WINDOW, step_interval=ONCE)}
COPIED = {**MOVING, "eplb_config": EPLBConfig(window_size=WINDOW, step_interval=ONCE, num_redundant_experts=8)}


class SkewedPool(RankPool):
    """Ranks whose routers prefer some experts."""

    def call(self, rank: int, function: Callable[..., None], *args: Any) -> None:
        super().call(rank, skewed, function, *args)


def skewed(function: Callable[..., None], *args: Any) -> None:
    noise.fill_with_noise = prefer
    function(*args)


def prefer(model: Any) -> None:
    fill_with_noise(model)
    for layer in model.modules():
        if isinstance(layer, RouterProduct):
            layer.weight.data[:PREFERRED] *= FACTOR


def measure_skew() -> None:
    noise.fill_with_noise = prefer
    pool, folder = SkewedPool(), make_folder()
    layouts: dict[str, dict[str, Any]] = {
        "experts stay": {},
        "experts move": MOVING,
        "experts move, 8 redundant ones": COPIED,
    }
    for name, options in layouts.items():
        window = options or {"eplb_config": EPLBConfig(window_size=WINDOW, step_interval=WINDOW)}
        config = EngineConfig(
            model=str(folder), dtype="bfloat16", load_format="dummy", num_threads=1, num_gpu_blocks_override=1024,
            **WHOLE, **window,
        )  # fmt: skip
        with pool.engine(config) as core:
            for round in range(3):  # experts move while the first one runs
                for load in ("8 requests", "2 prompts of 1,000"):
                    pids, started = [os.getpid(), *pool.pids[:1]], time.perf_counter()
                    before = cpu_seconds(pids)
                    tokens = compute(core, *LOADS[load])
                    wall = time.perf_counter() - started
                    used = [b - a for a, b in zip(before, cpu_seconds(pids), strict=True)]
                    waits = " ".join(f"{max(0.0, 1 - cpu / wall):4.0%}" for cpu in used)
                    report = core.stats().record(ExpertReport)
                    assert report is not None
                    (stats,) = report.stages
                    print(
                        f"{name:32} {round} {load:20} {tokens / wall:7.0f} tokens/s, ranks wait {waits}, balanced "
                        f"{stats.balancedness:.0%}, {stats.moved} moved", flush=True,
                    )  # fmt: skip
    pool.close()


def main() -> None:
    torch.set_num_threads(1)
    if "--skewed" in sys.argv[1:]:
        return measure_skew()
    pool, folder = RankPool(), make_folder()
    for layout in LAYOUTS:
        config = EngineConfig(
            model=str(folder),
            dtype="bfloat16",
            load_format="dummy",
            num_threads=1,
            num_gpu_blocks_override=1024,
            **layout,
        )
        with pool.engine(config) as core:
            compute(core, 2, 1)
            for name, load in LOADS.items():
                pids = [os.getpid(), *pool.pids[: config.num_ranks - 1]]
                before, started = cpu_seconds(pids), time.perf_counter()
                tokens = compute(core, *load)
                wall = time.perf_counter() - started
                used = [b - a for a, b in zip(before, cpu_seconds(pids), strict=True)]
                waits = " ".join(f"{max(0.0, 1 - cpu / wall):4.0%}" for cpu in used)
                shown = ", ".join(f"{key} {value}" for key, value in layout.items()) or "one rank"
                print(f"{shown:66} {name:20} {tokens / wall:7.0f} tokens/s, ranks wait {waits}", flush=True)
    pool.close()


if __name__ == "__main__":
    main()
