"""Chooses what computes the layers of a rank."""

from __future__ import annotations

import logging
from functools import partial

from engine.model import fused_rows
from engine.model.models.llama import Model
from engine.options.kernels import KernelOptions
from engine.runner.graphs.gpu_layers import GPULayers
from engine.runner.graphs.recorded_layers import RecordedLayers
from engine.runner.graphs.warm_up import run_dummy_step
from engine.runner.layer_runner import LayerRunner
from engine.runner.rank_setup import RankSetup

logger = logging.getLogger(__name__)


def open_layers(setup: RankSetup, model: Model) -> LayerRunner:
    """Return what computes the layers of a model, after changing them into faster ones. Raises StartupError."""
    fused_rows.fuse(model)
    if setup.config.of(KernelOptions).torch_compile:
        compile_model(setup, model)
    return (GPULayers if setup.device.asynchronous else RecordedLayers)(setup, model)


def compile_model(setup: RankSetup, model: Model) -> None:
    """Compile the model's layers with torch.compile."""
    if setup.config.of(KernelOptions).enforce_eager:
        logger.info("torch_compile has no effect, because enforce_eager is set")
        return
    from engine.runner.graphs.torch_compile import compile_layers  # importing torch's compiler takes seconds

    compile_layers(model, setup.model, setup.tp, partial(run_dummy_step, setup, model, seqs=1))
