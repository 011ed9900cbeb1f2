"""Tries our own kernels as an engine starts on a GPU, as libraries are tried (ops/gpu/libraries/choice.py).

The model's first layers are built with random weights, and compute steps of every kind. Where a kernel is wrong, plain
torch takes its place if it can; else the engine does not start. Compilers are known to have been wrong: ptxas 12.8 on
Hopper (flash-linear-attention #1262, triton #11366, vllm #48590).
"""

from __future__ import annotations

import gc
import logging
import re
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from engine.config import BLOCK_SIZES, EngineConfig
from engine.device import is_gpu
from engine.distributed.tp_group import TPGroup
from engine.errors import StartupError
from engine.kernel_trial.rank_alone import RankAlone
from engine.kernel_trial.reduced_model import reduced
from engine.kernel_trial.steps import PROMPTS, most_tokens, num_blocks, trial_plans
from engine.model.config import ModelConfig
from engine.model.layers.lora import LinearAdapters
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
    """Try the kernels of a model, if it runs on a GPU with Triton. open_runner: ModelRunner, which this package does
    without. Raises StartupError for a wrong kernel that nothing can replace."""
    if not has_kernels(config, model):
        return
    from engine.model.ops.gpu import dependent_launch  # needs Triton

    started = time.perf_counter()
    verdicts = try_kernels(config, model, folder, open_runner)
    for verdict in verdicts:
        if verdict.op in MISCOMPILED and torch.cuda.get_device_capability() == HOPPER and ptxas_version() < SOUND_PTXAS:
            raise StartupError(
                f"kernel {verdict.op} needs a ptxas of CUDA 13.1 or newer on Hopper ({environment()}). Set "
                "TRITON_PTXAS_PATH; the package nvidia-cuda-nvcc has one"
            )
        if not verdict.wrong:
            continue
        if verdict.kernel is dependent_launch.begin:
            dependent_launch.refuse()
            logger.warning("early launch: %s; kernels start one after another from now on", verdict.wrong)
        elif dispatch.refuse(verdict.kernel):
            logger.warning("kernel %s: %s from plain torch, which takes its place", verdict.op, verdict.wrong)
        else:
            raise StartupError(
                f"kernel {verdict.op}: {verdict.wrong} from plain torch ({environment()}). Update Triton, or set "
                "TRITON_PTXAS_PATH to a ptxas of CUDA 13.1 or newer"
            )
    gc.collect()  # the model's memory is free before the real one is loaded
    logger.info("%d kernels tried seconds=%.1f", len(verdicts), time.perf_counter() - started)


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

    def open_model(config: EngineConfig) -> Any:
        runner = open_runner(config, reduced(model), folder, RankAlone(config.tensor_parallel_size))
        if config.enable_lora:
            fill_adapters(runner.model)
        return runner

    chosen = trial_config(config)
    verdicts = try_each(open_model(chosen), chosen)
    if dependent_launch.supported(torch.device("cuda")):
        gc.collect()  # the runner's memory is free before the next one is opened
        verdicts.append(compare_steps(chosen, open_model))
    return verdicts


def try_each(runner: Any, config: EngineConfig) -> list[Verdict]:
    """Return the verdict on each kernel, by itself, in the steps of a trial. Closes the ModelRunner."""
    from engine.kernel_trial.trial import KernelTrial  # needs Triton

    for tensor in (tensor for layer in runner.states.layers for tensor in layer.values()):
        tensor.zero_()  # what no sequence has written is compared too
    trial = KernelTrial(runner.device)
    trial.watch(runner.model)
    runner.sample_rows = trial.watched(runner.sample_rows)
    groups, vocab_size = runner.model_config.kv_groups, runner.model_config.vocab_size
    for plan in trial_plans(vocab_size, groups, runner.block_size, config.enable_lora):
        runner.collect(runner.launch(runner.prepare(plan)))
    runner.close()
    return list(trial.verdicts.values())


def fill_adapters(model: nn.Module) -> None:
    """Fill all slots for adapters with random factors, the same each time."""
    for layer in [value for module in model.modules() for value in vars(module).values()]:
        if isinstance(layer, LinearAdapters):
            generator = torch.Generator(layer.weights.a.device).manual_seed(0)
            layer.weights.a.normal_(std=0.1, generator=generator)
            layer.weights.b.normal_(std=0.1, generator=generator)
            layer.weights.ranks.fill_(layer.weights.rank)


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
        enforce_eager=True,
        enable_prefix_caching=False,
        enable_lora=config.enable_lora,
        max_loras=1 if config.enable_lora else None,
        max_lora_rank=config.max_lora_rank,
        tensor_parallel_size=config.tensor_parallel_size,
        enable_expert_parallel=config.enable_expert_parallel and config.tensor_parallel_size > 1,
        allow_untested_kernels=config.allow_untested_kernels,
        num_threads=config.num_threads,
    )


def environment() -> str:
    """Return the card and the versions on which a kernel's code depends."""
    import triton

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    ptxas = ".".join(map(str, ptxas_version())) or "of unknown version"
    return f"{card}, torch {torch.__version__}, triton {triton.__version__}, ptxas {ptxas}"


@cache
def ptxas_version() -> tuple[int, ...]:
    """Return the version of the assembler that Triton uses; empty if it cannot be found out."""
    from triton import knobs

    try:
        found = subprocess.run([knobs.nvidia.ptxas.path, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired, AttributeError):
        return ()
    version = re.search(r"release (\d+)\.(\d+)", found.stdout)
    return tuple(map(int, version.groups())) if version else ()
