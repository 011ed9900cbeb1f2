"""Tries our own kernels as an engine starts on a GPU, as libraries are tried (ops/gpu/libraries/choice.py).

The model's first layers are built with random weights, and compute steps of every kind. Where a kernel is wrong, plain
torch takes its place if it can; else the engine does not start. Compilers are known to have been wrong: ptxas 12.8 on
Hopper (flash-linear-attention #1262, triton #11366, vllm #48590).
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.config import EngineConfig
from engine.devices.device import is_gpu
from engine.distributed.tp_group import TPGroup
from engine.engine_options import BLOCK_SIZES
from engine.errors import StartupError
from engine.kernel_trial.environment import environment, ptxas_version
from engine.kernel_trial.rank_alone import RankAlone
from engine.kernel_trial.record import TrialRecord
from engine.kernel_trial.reduced_model import reduced
from engine.kernel_trial.steps import PROMPTS, compute_steps, most_tokens, num_blocks
from engine.kernel_trial.tried_part import tried_parts
from engine.model.config import ModelConfig
from engine.model.ops import dispatch

if TYPE_CHECKING:
    from engine.kernel_trial.trial import Verdict

logger = logging.getLogger(__name__)

OpenRunner = Callable[[EngineConfig, ModelConfig, Path, TPGroup], Any]  # returns a ModelRunner

HOPPER = (9, 0)
SOUND_PTXAS = (13, 1)
MISCOMPILED = ("linear_attention.linear_attention", "low_rank.add")
"""Kernels like those for which wrong code of an older ptxas on Hopper is reported. A trial cannot show every case."""


def check_kernels(config: EngineConfig, model: ModelConfig, folder: Path, open_runner: OpenRunner) -> None:
    """Try the kernels of a model, if it runs on a GPU with Triton and no start before has shown that they are right.

    open_runner: loads a model, as `load_runner` of engine/assembly/open_runner.py. Raises StartupError for a wrong
    kernel that nothing can replace, and if a trial ends with any other error.
    """
    if not has_kernels(config, model):
        return
    record = TrialRecord.of(trial_config(config), reduced(model))
    if record is not None and record.exists():
        logger.info("all kernels were right in an earlier trial: %s", record.file)
        return
    started = time.perf_counter()
    try:
        verdicts = try_kernels(config, model, folder, open_runner)
        if refuse_early_launch(verdicts):
            verdicts = try_kernels(config, model, folder, open_runner)  # as they are compiled from now on
    except StartupError:
        raise
    except Exception as error:
        raise StartupError(f"the trial of kernels failed ({environment()}): {error!r}") from error
    for verdict in verdicts:
        refuse_if_wrong(verdict)
    if record is not None and not any(verdict.wrong for verdict in verdicts):
        record.write(verdicts)
    gc.collect()  # the model's memory is free before the real one is loaded
    logger.info("%d kernels tried seconds=%.1f", len(verdicts), time.perf_counter() - started)


def refuse_early_launch(verdicts: list[Verdict]) -> bool:
    """Let kernels start one after another from now on if whole steps were wrong with early launch."""
    from engine.model.ops.gpu import dependent_launch  # needs Triton

    for verdict in verdicts:
        if verdict.kernel is dependent_launch.begin and verdict.wrong:
            dependent_launch.refuse()
            logger.warning("early launch: %s; kernels start one after another from now on", verdict.wrong)
            return True
    return False


def refuse_if_wrong(verdict: Verdict) -> None:
    """Let plain torch take the place of a wrong kernel. Raises StartupError if it cannot, and for a kernel that must be
    taken to be wrong."""
    if verdict.op in MISCOMPILED and torch.cuda.get_device_capability() == HOPPER and ptxas_version() < SOUND_PTXAS:
        raise StartupError(
            f"kernel {verdict.op} needs a ptxas of CUDA 13.1 or newer on Hopper ({environment()}). Set "
            "TRITON_PTXAS_PATH; the package nvidia-cuda-nvcc has one"
        )
    if not verdict.wrong:
        return
    if not dispatch.refuse(verdict.kernel):
        raise StartupError(
            f"kernel {verdict.op}: {verdict.wrong} from plain torch ({environment()}). Update Triton, or set "
            "TRITON_PTXAS_PATH to a ptxas of CUDA 13.1 or newer"
        )
    logger.warning("kernel %s: %s from plain torch, which takes its place", verdict.op, verdict.wrong)


def has_kernels(config: EngineConfig, model: ModelConfig) -> bool:
    """Return whether a model generates with kernels of ours on this device, and is long enough for their trial."""
    dtype: torch.dtype = getattr(torch, model.dtype if config.dtype == "auto" else config.dtype)
    if not is_gpu(config.device) or not dispatch.gpu_kernels(dtype, torch.device("cuda")):
        return False
    return model.head == "lm" and not model.transformers and model.max_position_embeddings >= most_tokens()


def try_kernels(
    config: EngineConfig, model: ModelConfig, folder: Path, open_runner: OpenRunner
) -> list[Verdict]:  # fmt: skip
    """Return the verdict on each kernel that the layers of a model use, and on their early launch if the GPU has it.
    open_runner: as for `check_kernels`."""
    from engine.kernel_trial.early_launch import compare_steps  # needs Triton
    from engine.model.ops.gpu import dependent_launch

    runner = open_runner(trial_config(config), reduced(model), folder, RankAlone(config.tensor_parallel_size))
    try:
        for part in tried_parts(runner):
            part.fill()
        runner.layers.graphs.drop()  # one kernel after another, at first
        verdicts = try_each(runner)
        if dependent_launch.in_use(runner.device.torch_device):
            verdicts.append(compare_steps(runner))
    finally:
        runner.close()
    return verdicts


def try_each(runner: Any) -> list[Verdict]:
    """Return the verdict on each kernel, by itself, in the steps of a trial of a ModelRunner."""
    from engine.kernel_trial.trial import KernelTrial  # needs Triton

    with KernelTrial(runner.device).watching(runner) as trial:
        compute_steps(runner)
    return list(trial.verdicts.values())


def trial_config(config: EngineConfig) -> EngineConfig:
    """Return the options that change which kernels a model uses, and small numbers for all else."""
    block_size = config.block_size or BLOCK_SIZES["cuda"]
    return EngineConfig(
        model=config.model,
        hf_overrides=config.hf_overrides,
        dtype=config.dtype,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        device=config.device,
        block_size=block_size,
        max_model_len=most_tokens(),
        max_num_batched_tokens=PROMPTS[0],
        max_num_seqs=len(PROMPTS),
        num_gpu_blocks_override=num_blocks(block_size),
        load_format="dummy",
        enable_prefix_caching=False,
        tensor_parallel_size=config.tensor_parallel_size,
        enable_expert_parallel=config.enable_expert_parallel and config.tensor_parallel_size > 1,
        num_threads=config.num_threads,
        **config.for_kernels(),
    )
