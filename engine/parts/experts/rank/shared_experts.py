"""Experts that several engines share: their steps are launched together."""

from __future__ import annotations

from typing import cast

from engine.distributed.data_parallel.data_parallel_group import DataParallelGroup
from engine.distributed.tp_group import TPGroup
from engine.eplb.shared_rank_experts import SharedRankExperts
from engine.model.models.llama import Model
from engine.parts.experts.rank.experts import ExpertLayers
from engine.parts.experts.rank.wave_launcher import FollowingLauncher, WaveLauncher
from engine.runner.graphs.cuda_graphs import NoGraphs
from engine.runner.graphs.gpu_layers import GPULayers
from engine.runner.graphs.shared_graphs import SharedGraphs
from engine.runner.launcher import StepRunner
from engine.runner.layer_runner import LayerRunner, Run
from engine.wire.parts.experts import ExpertReport


class SharedExpertLayers(ExpertLayers):
    def attach(self, model: Model) -> None:
        super().attach(model)
        self._model = model

    def start(self, run: Run, runner: LayerRunner) -> None:
        super().start(run, runner)
        graphs = runner.graphs if isinstance(runner, GPULayers) else NoGraphs()
        self._graphs = cast("SharedGraphs | NoGraphs", graphs)

    def report(self) -> ExpertReport | None:
        return ExpertReport(self.rank.stats) if isinstance(self.rank, SharedRankExperts) else None

    def launcher(self, runner: StepRunner, group: TPGroup) -> WaveLauncher:
        assert isinstance(group, DataParallelGroup)
        launcher = WaveLauncher if group.leads else FollowingLauncher
        return launcher(runner, group, self._model, self._graphs, self.rank)
