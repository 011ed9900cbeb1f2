"""Variants of our kernels that steps need, counted on tensors without values:
python -m tests.engine.model.ops.gpu.specializations CASE...

Triton compiles a kernel anew for each combination of constants, types, and integers that are 1 or multiples of 16. For
each case, prints the variants that random steps need beyond those of the warm-up, of all graphs and of the memory
profile, one JSON object per line. Not under the interpreter.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from triton.runtime import driver

from benchmarks.gpu import meta_steps
from benchmarks.gpu.engines import shape_config
from benchmarks.gpu.meta_steps import META, Launches, MetaModel
from engine.model.ops.gpu import sampling
from engine.model.ops.sampling_plain import RandomRows
from engine.runner.cuda_graphs import decode_sizes, mixed_sizes
from engine.runner.warm_up import CHUNKS, CONTEXTS
from tests.engine.model.ops.gpu.compile_kernels import Driver
from tests.examples import examples

MAX_TOKENS, MAX_SEQS, STEPS = 8192, 256, examples(200)
IN_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("8B", {}),
    "norms of heads": ("0.6B", {}),
    "experts": ("30B-A3B", {}),
    "fp8": ("8B", {"quantization": "fp8"}),
    "fp8 in blocks": ("8B", {"quantization_config": IN_BLOCKS}),
    "int8": ("8B", {"quantization": "int8"}),
    "int4": ("8B", {"quantization": "int4"}),
    "fp8 experts": ("30B-A3B", {"quantization": "fp8"}),
    "int4 experts": ("30B-A3B", {"quantization": "int4"}),
    "gpt-oss": ("gpt-oss 20B", {"layer_types": ["sliding_attention", "full_attention"]}),
    "recurrent": ("Qwen3-Next 80B-A3B", {"full_attention_interval": 2}),
    "latent": ("DeepSeek V2 Lite", {}),
}


class Variants(Launches):
    """Launches that also note which variant of its kernel each needs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def _launch(self, kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        launch = super()._launch(kernel, grid)

        def noted(*args: Any, **options: Any) -> None:
            launch(*args, **options)
            _, specialization, chosen = kernel.create_binder()[-1](*args, **options)
            self.found.add(f"{kernel.fn.__name__} {specialization} {sorted(chosen.items())}")

        return noted


class Steps:
    """Steps of a model and the draws of their tokens, with the variants that they need."""

    def __init__(self, shape: str, options: dict[str, Any]):
        config = shape_config(shape, num_hidden_layers=2, **options)
        with mock.patch.object(torch, "equal", return_value=True):  # groups of a checkpoint, which are even here
            self._model, self._vocab_size = MetaModel(config), config.vocab_size

    def variants(self, tokens: int, seqs: int, context: int) -> set[str]:
        noted = Variants()
        self._model.launches(tokens, seqs, context, noted)
        with torch.inference_mode(), meta_steps.as_on_a_gpu((9, 0)), noted:
            logits, column = (torch.empty(seqs, size, device=META) for size in (self._vocab_size, 1))
            rows, top_k = torch.empty(seqs, dtype=torch.int64, device=META), column.int()
            sampling.sample_rows(logits, [])
            for width in (0, self._vocab_size):
                sampling.sample_rows(logits, [RandomRows(rows, column, column, column, column, top_k, width)])
        return noted.found


def missing(case: str) -> list[str]:
    """Return the variants that random steps need and that nothing before the first request has compiled."""
    steps, chance = Steps(*CASES[case]), random.Random(0)
    before = [(1, 1, context) for context in CONTEXTS] + [
        (1 + chunk, 2, context) for chunk in CHUNKS for context in CONTEXTS
    ]
    before += [(size, size, MAX_TOKENS) for size in decode_sizes(MAX_SEQS)]
    before += [(size, min(size, MAX_SEQS), MAX_TOKENS) for size in mixed_sizes(MAX_TOKENS)]
    before.append((MAX_TOKENS, MAX_SEQS, MAX_TOKENS))
    known = set[str]().union(*(steps.variants(*step) for step in before))
    new = set[str]()
    for _ in range(STEPS):
        seqs = chance.choice((1, 2, 3, chance.randint(1, MAX_SEQS)))
        tokens = chance.choice((seqs, chance.randint(seqs, 2 * seqs), chance.randint(seqs, MAX_TOKENS)))
        new |= steps.variants(tokens, seqs, chance.randint(-(-tokens // seqs), MAX_TOKENS)) - known
    return sorted(new)


if __name__ == "__main__":
    driver.set_active(Driver(90))
    for case in sys.argv[1:]:
        print(json.dumps({"case": case, "missing": missing(case)}), flush=True)
