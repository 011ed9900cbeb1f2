"""Computes the layers of steps on a CPU as one graph of kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.model.models.llama import Model
from engine.model.ops import dispatch
from engine.runner.graphs.choice import can_capture
from engine.runner.layer_runner import LayerRunner
from engine.runner.rank_setup import RankSetup
from engine.runner.step import Forward, StepMemory
from engine.wire.parts.states import StateStep

if TYPE_CHECKING:
    from engine.model.ops.cpu.step_graph import StepGraph


class RecordedLayers(LayerRunner):
    """Replays a graph, if all code of the model is kernels of ours."""

    graph: StepGraph | None = None

    def open(self, memory: StepMemory) -> None:
        super().open(memory)
        self.graph = record_steps(self._setup, self._model, memory)

    def run(self, step: Forward) -> Tensor:
        if self.graph is None or step.batch is None or step.batch.beyond_text:
            return super().run(step)
        x = step.hidden
        if x is None:
            x = self._model.embed(self.token_ids(step))
            if step.embeddings is not None:
                x = x.index_copy(0, *step.embeddings)
        return self.graph.run(x, step.batch)


def record_steps(setup: RankSetup, model: Model, memory: StepMemory) -> StepGraph | None:
    """Return the model's layers as one graph of CPU kernels; None if some of their code is not ours."""
    if setup.tp.size > 1 or not can_capture(setup) or not dispatch.cpu_kernels(setup.dtype, setup.torch_device):
        return None
    from engine.model.ops.cpu.step_graph import RECORDED, StepGraph

    max_blocks = -(-memory.history.shape[1] // setup.block_size)
    max_tokens = max(setup.config.max_num_batched_tokens, sum(RECORDED))
    x = torch.empty(max_tokens, setup.model.hidden_size, dtype=setup.dtype)
    latent_heads = None if setup.model.latent is None else setup.model.num_heads
    kept = memory.kv_caches, memory.kv_scales, memory.of.get(StateStep.part)
    graph = StepGraph(model.run_layers, x, max_blocks, *kept, latent_heads)
    return graph if graph.record() else None
