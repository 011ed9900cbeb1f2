"""Compiles the Triton kernels that a model needs on a GPU, on a machine without one.

A graph of each size, the warm-up and the largest step together need every kernel that any later step needs, as
tests/engine/model/ops/gpu/test_specializations.py shows. So these steps are computed on tensors without values. Kernels
of vision towers, of drafters with heads, and of sorting and copying in torch are not ours, or are compiled at start.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from engine.config import EngineConfig
from engine.model.config import ModelConfig
from engine.model.models.llama import Model
from engine.model.ops.gpu import logits as logit_edits
from engine.model.ops.gpu import sampling
from engine.model.ops.gpu.compile_target import Variant, variants
from engine.model.ops.logits.penalties import Penalties
from engine.offline.weightless_model import META, PROCESSORS, WeightlessModel, as_on_a_gpu
from engine.parts.table import rank_modules
from engine.runner.graphs.cuda_graphs import MAX_DECODE_SIZE, decode_sizes, mixed_sizes
from engine.runner.graphs.warm_up import CHUNKS, CONTEXTS

MAX_PROCESSES = 16  # each takes some hundred MiB


class Step(NamedTuple):
    """The sizes of a step; see `WeightlessModel.compute`."""

    tokens: int
    seqs: int
    context: int
    verified: int = 0
    images: bool = False


def first_steps(config: EngineConfig, context: int, *, images: bool = False) -> list[Step]:
    """Return the steps that an engine computes before its first request. context: tokens of its longest sequence.
    images: whether a model has images whose tokens attend to each other."""
    most, seqs, shorter = config.max_num_batched_tokens, config.max_num_seqs, [min(c, context) for c in CONTEXTS]
    steps = [Step(1, 1, length) for length in shorter]
    steps += [Step(1 + chunk, 2, length) for chunk in CHUNKS for length in shorter]
    steps += [Step(size, size, context) for size in decode_sizes(seqs)]
    steps += [Step(size, min(size, seqs), context) for size in mixed_sizes(most)]
    if config.speculative_config:
        tokens = 1 + config.speculative_config.num_speculative_tokens
        sizes = decode_sizes(min(seqs, MAX_DECODE_SIZE // tokens, most // tokens))
        steps += [Step(size * tokens, size, context, tokens) for size in sizes]
        steps.append(Step(1 + tokens, 2, context, tokens))
    if images:
        steps += [Step(chunk, 1, length, images=True) for chunk in CHUNKS for length in (*shorter, context)]
        steps.append(Step(most, 1, context, images=True))
    return [*steps, Step(most, seqs, context)]


def compute(model: WeightlessModel, step: Step) -> None:
    """Compute a step, edit its logits and choose its best tokens."""
    model.compute(*step)
    size = model.config.vocab_size
    with torch.inference_mode(), as_on_a_gpu(model.capability):
        logits, column = (torch.empty(step.seqs, count, device=META) for count in (size, 1))
        rows = torch.empty(step.seqs, dtype=torch.int64, device=META)
        sampling.sample_rows(logits, [])
        bits = torch.empty(step.seqs, -(-size // 8), dtype=torch.uint8, device=META)
        logit_edits.apply_masks(logits, rows, bits)
        penalties = Penalties(rows.expand(5, -1), column.squeeze(1).expand(3, -1), step.seqs)
        logit_edits.penalise(logits, penalties, torch.empty(1, step.context, dtype=torch.int32, device=META))


def needed(config: EngineConfig, model: ModelConfig, capability: tuple[int, int]) -> list[Variant]:
    """Return what an engine with this configuration compiles on a GPU of this compute capability."""
    if capability not in PROCESSORS:
        raise ValueError(f"compute capability {capability}, where {sorted(PROCESSORS)} are known")
    dtype: torch.dtype = getattr(torch, model.dtype if config.dtype == "auto" else config.dtype)
    weightless = WeightlessModel(
        model,
        ranks=config.tensor_parallel_size,
        capability=capability,
        dtype=dtype,
        kv_dtype=dtype if config.kv_cache_dtype == "auto" else torch.float8_e4m3fn,
        block_size=config.known_block_size,
        extend=partial(extend_layers, config),
    )
    context = config.max_model_len or model.max_position_embeddings
    with variants(capability[0] * 10 + capability[1]) as found:
        for step in first_steps(config, context, images=model.longest_span > 0):
            compute(weightless, step)
    return list(found.values())


def extend_layers(config: EngineConfig, model: Model) -> None:
    """Add to the layers of a model without weights what parts of a rank do."""
    for module in rank_modules("weightless"):
        module.extend(model, config)


def compile_all(wanted: Iterable[Variant], capability: tuple[int, int]) -> int:
    """Compile kernels in as many processes as there are cores. Returns their number."""
    found = list(wanted)
    processes = min(os.cpu_count() or 1, MAX_PROCESSES, max(1, len(found)))
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _keep, (found,)) as pool:
        list(pool.map(_compile, range(len(found)), [capability[0] * 10 + capability[1]] * len(found)))
    return len(found)


_variants: list[Variant] = []


def _keep(found: list[Variant]) -> None:
    _variants[:] = found


def _compile(number: int, capability: int) -> None:
    _variants[number].compile(capability)
