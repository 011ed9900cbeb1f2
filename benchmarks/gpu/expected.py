"""What steps should take on a GPU, from counted kernels and bytes, beside what they took where that was measured.

    python -m benchmarks.gpu.expected [--measured build/gpu/gpu.json]

Needs no GPU. A step takes as long as it has to read, or to multiply, at a part of the card's own rates that well-made
kernels reach, and a moment for each kernel, longer for those that are no product and no attention. These parts are
estimates until a card has confirmed them. Weights of 4 or 8 bits that are converted before they are multiplied take
instructions, which may take longer than to read the weights.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from benchmarks.gpu.card import CARDS, Card, prompt_flops, step_bytes
from benchmarks.gpu.engines import shape_config
from benchmarks.gpu.meta_steps import Launches, MetaModel
from engine.model.layers.moe import Experts
from engine.model.ops.gpu.experts.moe import row_format
from engine.model.quantization.packed_experts import PackedExperts
from engine.offline.weightless_model import as_on_a_gpu

MEMORY = 0.88  # of the copy rate, that products with few rows and attention of decode steps reach
MATRIX = 0.65  # of the matrix rate, that a prompt reaches, attention included
EXPERTS = 0.5  # of the copy rate, by products of experts with hardly a row each
KERNEL_S = 1.3e-6  # between two kernels of a graph
HIDDEN_S = 0.7e-6  # of it, for a kernel that is launched while the one before it ends
SMALL_S = 3e-6  # a kernel that reads little: as long as it takes to start and to end
LARGE = {
    "linear", "mm", "bmm", "_scaled_mm", "_int_mm", "_grouped_mm", "_scaled_grouped_mm", "grouped_kernel",
    "attend_kernel", "latent_kernel", "linear_attention_kernel",
}  # fmt: skip
"""Kernels whose time is that of what they read."""
CONVERTED = {"mxfp4": 7.4, "int8": 7.0, "float8": 9.0, "int4": 9.0}
"""Instructions of a thread for each weight, in the longest loop of the compiled kernel (compile_kernels.py in tests).

For MXFP4: 439 for 64 weights in tiles of 16 rows, 461 in tiles of 64 rows, and 2 % for padding. About half of them need
the integer units, which take two cycles for each, so these units are not the limit.
"""
INSTRUCTIONS_PER_S = 0.7 * 132 * 128 * 1.755e9  # of an H100 or H200, whose schedulers are busy 70 % of the time
REDUCE_S = 8e-6  # an all-reduce of a few rows between eight GPUs


@dataclass(frozen=True, slots=True)
class Case:
    """A step: of `seqs` sequences that decode behind `context` tokens, or of a prompt of `tokens`."""

    shape: str
    tokens: int
    seqs: int
    context: int
    ranks: int = 1
    fp8: bool = False  #: weights and KV

    @property
    def decodes(self) -> bool:
        return self.tokens == self.seqs


CASES = {  # by the names of parts.py, as far as it has them
    "decode 8B, batch 1": Case("8B", 1, 1, 1100),
    "decode 8B, batch 64": Case("8B", 64, 64, 1100),
    "decode 8B, batch 256": Case("8B", 256, 256, 1100),
    "prefill 8B, 8192 tokens": Case("8B", 8192, 1, 8192),
    "decode 8B, batch 1, fp8": Case("8B", 1, 1, 1100, fp8=True),
    "decode 8B, batch 64, fp8": Case("8B", 64, 64, 1100, fp8=True),
    "decode 8B, one of 100k among 63 of 1k": Case("8B", 64, 64, 2650),
    "decode 0.6B, batch 256": Case("0.6B", 256, 256, 800),
    "decode 30B-A3B, batch 1": Case("30B-A3B", 1, 1, 1100),
    "decode 30B-A3B, batch 64": Case("30B-A3B", 64, 64, 1100),
    "decode 30B-A3B, batch 256": Case("30B-A3B", 256, 256, 1100),
    "decode 30B-A3B, batch 64, fp8": Case("30B-A3B", 64, 64, 1100, fp8=True),
    **{
        f"decode {shape}, batch {seqs}": Case(shape, seqs, seqs, 1100, ranks)
        for shape, ranks in (("Qwen3 8B", 1), ("gpt-oss 20B", 1), ("Qwen3-Next 80B-A3B", 4), ("DeepSeek V2 Lite", 1))
        for seqs in (1, 64, 256)
    },
    "decode 70B, batch 1, TP 8": Case("70B", 1, 1, 1100, ranks=8),
    "decode 70B, batch 64, TP 8": Case("70B", 64, 64, 1100, ranks=8),
}


@dataclass(frozen=True, slots=True)
class Counts:
    """What one rank does in a step."""

    gigabytes: float  #: of weights, KV and states that it reads
    slow_gigabytes: float  #: those of experts with hardly a row each
    flops: float
    launches: Counter[str]  #: of the graph and the head
    dependent: int  #: of these, launched while the kernel before them ends
    converted: list[tuple[float, float]]  #: bytes of weights that are converted, and the seconds that it takes

    def floor_s(self, card: Card, case: Case) -> float:
        return self.gigabytes * 1e9 / card.bytes_per_s if case.decodes else self.flops / card.flops

    def expected_s(self, card: Card, case: Case) -> float:
        work = self.floor_s(card, case) / (MEMORY if case.decodes else MATRIX)
        work += self.slow_gigabytes * 1e9 / card.bytes_per_s * (1 / EXPERTS - 1 / MEMORY)
        for read, seconds in self.converted:
            work += max(0.0, seconds - read / card.bytes_per_s / MEMORY)
        small = sum(count for name, count in self.launches.items() if name not in LARGE)
        work -= HIDDEN_S * self.dependent
        return work + KERNEL_S * self.launches.total() + SMALL_S * small + REDUCE_S * self.launches["all_reduce"]


@cache
def meta_model(shape: str, ranks: int = 1, capability: tuple[int, int] = (9, 0), fp8: bool = False) -> MetaModel:
    kv_dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    return MetaModel(shape_config(shape, "fp8" if fp8 else None), ranks, capability, kv_dtype=kv_dtype)


@cache
def count(case: Case, capability: tuple[int, int] = (9, 0)) -> Counts:
    model = meta_model(case.shape, case.ranks, capability, case.fp8)
    config, kv_dtype = model.config, model.kv_dtype
    lengths = [case.context] * case.seqs if case.decodes else []
    kv = step_bytes(config, 0.0, kv_dtype, lengths) / case.ranks
    noted = Launches()
    launches = model.launches(case.tokens, case.seqs, config.max_position_embeddings, noted)
    dependent = sum(count for name, count in launches.items() if name in noted.dependent)
    flops = prompt_flops(config, case.tokens) / case.ranks
    read = model.weight_bytes(case.tokens) + kv
    moe, slow = config.moe, 0.0
    if moe is not None and case.tokens * moe.experts_per_token <= moe.num_experts:
        slow = model.weight_bytes(case.tokens, of=Experts)
    converted = conversions(model, case.tokens) if case.decodes else []
    return Counts(read / 1e9, slow / 1e9, flops, launches, dependent, converted)


def conversions(model: MetaModel, tokens: int) -> list[tuple[float, float]]:
    """Return for each weight that a step of so many tokens converts the bytes that it reads of it, and the seconds that
    the conversion takes."""
    found, moe = [], model.config.moe

    def note(share: float, weights: int, bytes_read: int, format: str) -> None:
        found.append((share * bytes_read, share * weights * CONVERTED[format] / INSTRUCTIONS_PER_S))

    with as_on_a_gpu(model.capability):
        for layer in model.model.modules():
            if isinstance(layer, Experts) and layer.kept is not None and moe is not None:
                share = 1 - (1 - moe.experts_per_token / moe.num_experts) ** tokens
                for weight in layer.kept[1:]:
                    if isinstance(weight, PackedExperts) and row_format(weight, model.dtype) is None:
                        note(share, math.prod(weight.shape), weight.values.nbytes + weight.scales.nbytes, weight.format)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--measured", type=Path, help="gpu.json of `make bench-gpu`")
    measured = {}
    if (path := parser.parse_args().measured) is not None:
        parts = json.loads(path.read_text(encoding="utf-8"))["parts"]
        measured = {part["name"]: part["numbers"].get("ms/step", part["numbers"].get("ms")) for part in parts}
    names = [f"{name}: floor, expected ms" for name in CARDS]
    print("| step | kernels | GB | " + " | ".join(names) + " | measured ms |")
    print("| --- " * (4 + len(CARDS)) + "|")
    for name, case in CASES.items():
        counts = count(case)
        times = [
            f"{1e3 * counts.floor_s(card, case):.1f}, {1e3 * counts.expected_s(card, case):.1f}"
            for card in CARDS.values()
        ]
        found = measured.get(name)
        found = "" if found is None else f"{found:.2f}"
        print(f"| {name} | {counts.launches.total()} | {counts.gigabytes:.1f} | {' | '.join(times)} | {found} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
