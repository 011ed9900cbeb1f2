"""Opens the runner of a rank, with its parts."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from engine.assembly.open_setup import open_setup
from engine.config import EngineConfig
from engine.devices.usable_cpus import usable_cpus
from engine.distributed.tp_group import TPGroup
from engine.kernel_trial.check import check_kernels
from engine.model.config import ModelConfig
from engine.parts.table import RANK_PARTS
from engine.runner.graphs.open_layers import open_layers
from engine.runner.model_runner import ModelRunner
from engine.runner.rank_part import RankParts
from engine.runner.rank_setup import RankSetup


def open_runner(
    config: EngineConfig, model: ModelConfig, folder: Path, group: TPGroup, host: str = "127.0.0.1"
) -> ModelRunner:
    """Load this rank's part of a model whose kernels are right. group: all ranks of the engine. host: IP address at
    which ranks of other engines reach this one. Every rank has to call this within `group.starting()`. Raises
    StartupError."""
    check_kernels(config, model, folder, load_runner)
    return load_runner(config, model, folder, group, host)


def load_runner(
    config: EngineConfig, model: ModelConfig, folder: Path, group: TPGroup, host: str = "127.0.0.1"
) -> ModelRunner:
    """Load this rank's part of a model. The arguments and errors are those of `open_runner`."""
    if config.pipeline_parallel_size > 1:
        from engine.parts.stages.rank.pipeline_stage import join_stage  # it needs pyzmq

        group = join_stage(config, model, group)
    setup = open_setup(config, model, folder, group, host)
    set_threads(config, setup.tp)
    parts = make_rank_parts(setup)
    with ExitStack() as opened:
        for close in parts.close[::-1]:
            opened.callback(close)
        runner = ModelRunner(setup, parts, open_layers)
        opened.pop_all()
    return runner


def make_rank_parts(setup: RankSetup, table: Sequence[str] = RANK_PARTS) -> RankParts:
    """Return the parts that a rank has. table: their folders, in the order in which they begin a step."""
    made = [importlib.import_module(f"..parts.{name}.rank.make", __package__).make(setup) for name in table]
    return RankParts([part for part in made if part is not None])


def set_threads(config: EngineConfig, tp: TPGroup) -> None:
    """Set torch's number of threads: the configured one, else at most this rank's share of the CPUs that it may use."""
    share = max(1, int(usable_cpus() / tp.all_engines.local_size))
    torch.set_num_threads(config.num_threads or min(torch.get_num_threads(), share))
