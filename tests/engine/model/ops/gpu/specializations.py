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
import tempfile
from bisect import bisect_left
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu.engines import SHAPES, shape_config
from engine.config import EngineConfig
from engine.distributed.tp_group import TPGroup
from engine.model.batch import Batch
from engine.model.ops.gpu.compile_target import variants
from engine.offline.precompile import Step, compute, extend_layers, first_steps
from engine.offline.weightless_model import BLOCKS, META, WeightlessModel, as_on_a_gpu
from engine.options.speculation import SpeculativeConfig
from engine.runner.graphs.cuda_graphs import CudaGraphs, StepShape, decode_sizes
from engine.spec_decode.eagle3 import eagle3_drafter
from engine.spec_decode.head_drafter import HeadDrafter
from engine.spec_decode.mtp import mtp_drafter
from engine.spec_decode.target import Target
from tests.examples import examples

MAX_TOKENS, MAX_SEQS, STEPS = 8192, 256, examples(200)
PLAIN = EngineConfig(model="", max_num_batched_tokens=MAX_TOKENS, max_num_seqs=MAX_SEQS, block_size=64)
DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
EAGLE = replace(PLAIN, speculative_config=SpeculativeConfig(method="eagle3", model="head", num_speculative_tokens=3))
MTP = replace(PLAIN, speculative_config=SpeculativeConfig(method="mtp", num_speculative_tokens=3))
IN_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
COLD = ", none in the warm-up"
IMAGES = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "image_token_index": 262144,
    "mm_tokens_per_image": 256, "vision_config": {
        "hidden_size": 64, "image_size": 896, "intermediate_size": 64, "model_type": "siglip_vision_model",
        "num_attention_heads": 4, "num_hidden_layers": 2, "patch_size": 14, "vision_use_head": False,
    },
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "num_hidden_layers": 6, "sliding_window": 1024,
        "vocab_size": 262208,
    },
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], EngineConfig]] = {
    "dense": ("8B", {}, PLAIN),
    "drafts": ("8B", {}, replace(PLAIN, speculative_config=DRAFTS)),
    "adapters": ("8B", {}, replace(PLAIN, enable_lora=True)),
    "norms of heads": ("0.6B", {}, PLAIN),
    "experts": ("30B-A3B", {}, PLAIN),
    "fp8": ("8B", {"quantization": "fp8"}, PLAIN),
    "fp8 in blocks": ("8B", {"quantization_config": IN_BLOCKS}, PLAIN),
    "int8": ("8B", {"quantization": "int8"}, PLAIN),
    "int4": ("8B", {"quantization": "int4"}, PLAIN),
    "fp8 experts": ("30B-A3B", {"quantization": "fp8"}, PLAIN),
    "int4 experts": ("30B-A3B", {"quantization": "int4"}, PLAIN),
    "gpt-oss": ("gpt-oss 20B", {"layer_types": ["sliding_attention", "full_attention"]}, PLAIN),
    "images": ("images", {}, PLAIN),
    "recurrent": ("Qwen3-Next 80B-A3B", {"full_attention_interval": 2}, PLAIN),
    "drafts for a recurrent model": (
        "Qwen3-Next 80B-A3B", {"full_attention_interval": 2}, replace(PLAIN, speculative_config=DRAFTS),
    ),
    "latent": ("DeepSeek V2 Lite", {}, PLAIN),
    "drafts for a latent model": ("DeepSeek V2 Lite", {}, replace(PLAIN, speculative_config=DRAFTS)),
    "a head that drafts": ("8B", {}, EAGLE),
    "a layer that predicts further tokens": (
        "Qwen3-Next 80B-A3B", {"full_attention_interval": 2, "num_nextn_predict_layers": 1}, MTP,
    ),
    "two ranks": ("8B", {}, replace(PLAIN, tensor_parallel_size=2)),
}  # fmt: skip


class Drafting(WeightlessModel):
    """A model whose steps are followed by those of a head that drafts: its first pass as a graph and without one, and
    its further passes."""

    def __init__(self, engine: EngineConfig, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._sizes, speculative = decode_sizes(engine.max_num_seqs), engine.speculative_config
        assert speculative is not None
        target = Target(
            self.model, self.config, Path(), TPGroup.single(), self.dtype, META, self.block_size, dummy=True  # type: ignore[arg-type]
        )  # fmt: skip
        with as_on_a_gpu(self.capability), mock.patch("engine.spec_decode.target.fill_with_noise"):
            self._drafter = mtp_drafter(target) if speculative.method == "mtp" else eagle(target)
        self._drafter.allocate(BLOCKS)
        self._first = self._drafter.first_pass(MAX_TOKENS)

    def compute_shape(self, graphs: CudaGraphs, shape: StepShape, inputs: Tensor) -> Tensor:
        seen: list[Batch] = []
        forward = graphs._forward
        graphs._forward = lambda ids, batch: (seen.append(batch), forward(ids, batch))[1]  # type: ignore[assignment]
        hidden = super().compute_shape(graphs, shape, inputs)
        (batch,), cache, head = seen, self._drafter._cache, self._drafter._head
        count, size = shape.seqs, self.config.hidden_size
        ids, states = torch.empty(shape.tokens, dtype=torch.int64, device=META), hidden.new_empty(shape.tokens, size)
        if self._first is not None:
            self._first.forward(ids, replace(batch, kv_cache=self._first.kv_cache, kv_scales=None, other_groups=()))
        out, _ = head(ids, states, cache.own(batch))
        head.best(out[:count])
        rows = self._sizes[bisect_left(self._sizes, count)]  # of the graph
        columns = ids.new_empty(3, rows), hidden.new_empty(rows, size)
        (ids, positions, capacity), states = columns
        tables = batch.block_table.new_empty(rows, batch.block_table.shape[1])
        cache._pass(ids, states, positions, capacity, tables, self._drafter._forward)
        return hidden


def eagle(target: Target) -> HeadDrafter:
    with tempfile.TemporaryDirectory() as folder:
        fields = {**SHAPES["EAGLE-3 for 8B"], "eagle_aux_hidden_state_layer_ids": [0, 1]}
        (Path(folder) / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        return eagle3_drafter(Path(folder), target)


def missing(case: str, *, warm: bool = True) -> list[str]:
    """Return the variants that random steps need and that nothing before the first request has compiled. warm: whether
    images are among the steps before."""
    shape, options, engine = CASES[case]
    config = shape_config(shape, num_hidden_layers=2, **options)
    sizes = config, engine.tensor_parallel_size
    if engine.speculative_config is not None and engine.speculative_config.method != "ngram":
        model: WeightlessModel = Drafting(engine, *sizes)
    else:
        model = WeightlessModel(*sizes, extend=partial(extend_layers, engine))
    chance = random.Random(0)
    with variants(90) as known:
        for step in first_steps(engine, MAX_TOKENS, images=warm and case == "images"):
            compute(model, step)
    with variants(90) as needed:
        for _ in range(STEPS):
            compute(model, random_step(chance, engine, case == "images"))
    return sorted(needed.keys() - known.keys())


def random_step(chance: random.Random, engine: EngineConfig, images: bool) -> Step:
    seqs = chance.choice((1, 2, 3, chance.randint(1, MAX_SEQS)))
    tokens = chance.choice((seqs, chance.randint(seqs, 2 * seqs), chance.randint(seqs, MAX_TOKENS)))
    verified = 1 + engine.speculative_config.num_speculative_tokens if engine.speculative_config else 0
    if verified and chance.random() < 0.5:
        tokens = chance.randint(seqs + 1, seqs * verified)
    else:
        verified = 0
    context = chance.randint(-(-tokens // seqs), MAX_TOKENS)
    return Step(tokens, seqs, context, verified, images and tokens != seqs and chance.random() < 0.5)


if __name__ == "__main__":
    SHAPES["images"] = IMAGES
    for case in sys.argv[1:]:
        found = missing(case.removesuffix(COLD), warm=not case.endswith(COLD))
        print(json.dumps({"case": case, "missing": found}), flush=True)
