"""Computes the layers of steps on a GPU, which keeps block tables and replays CUDA graphs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.devices.device import StagedCopy
from engine.devices.free_memory import FreeMemory
from engine.model.batch import Batch, split_rows
from engine.model.expert_split import exchange_of
from engine.model.models.llama import Model
from engine.options.kernels import KernelOptions
from engine.runner.graphs.block_tables import BlockTableRows
from engine.runner.graphs.choice import can_capture, graph_shapes
from engine.runner.graphs.cuda_graphs import CudaGraphs, NoGraphs, StepShape, UnpaddedStep
from engine.runner.graphs.gpu_memory import free_gpu_memory
from engine.runner.graphs.shared_graphs import SharedGraphs
from engine.runner.graphs.warm_up import run_dummy_step, warm_up_plans
from engine.runner.layer_runner import LayerRunner, Run
from engine.runner.rank_setup import RankSetup
from engine.runner.step import DummyStep, Forward, PreparedStep, StepInputs, StepMemory
from engine.runner.step_layout import BatchRows, StepLayout
from engine.wire.parts.states import StateStep
from engine.wire.plan import StepPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GPUStep(PreparedStep):
    """What a GPU needs of a step."""

    block_tables: BlockTableRows
    unpadded: UnpaddedStep | None  #: what a graph of any shape needs; None if no graph can compute the step
    graph: tuple[StepShape, Tensor] | None = None
    """The graph's shape and its inputs from `cuda_graphs.pad_step`; None for a step without a graph."""

    @property
    def needs_batch(self) -> bool:  # type: ignore[override]
        return self.graph is None

    @property
    def all_chunks(self) -> bool:  # type: ignore[override]
        return self.graph is not None and self.graph[0].verified > 0

    def as_graph(self, shape: StepShape, staged: StagedCopy) -> GPUStep:
        """Return the same step for a graph of this shape. Call it before `staged` is sent."""
        assert self.unpadded is not None, "no graph can compute this step"
        rows = split_rows(self.unpadded.counts, self.unpadded.kv_len, all_chunks=shape.verified > 0)
        return replace(self, graph=(shape, staged.add(self.unpadded.pad(shape, *rows))))


class GPULayers(LayerRunner):
    """Sends a GPU only changes of block tables: with long contexts, the rows of a batch are megabytes."""

    keeps_tables = True
    divides_drafts = False  # the KV of a sequence is read once for all its rows

    def __init__(self, setup: RankSetup, model: Model):
        super().__init__(setup, model)
        self.graphs: CudaGraphs | NoGraphs = NoGraphs()
        #: Where graphs read the hidden states of another rank; None on ranks that embed tokens.
        self._hidden: Tensor | None = None

    def free_memory(self, dummy_steps: Sequence[Callable[[DummyStep], None]]) -> FreeMemory:
        setup = self._setup
        if setup.torch_device.type == "cpu":  # that of a stand-in
            return super().free_memory(dummy_steps)
        return free_gpu_memory(setup, partial(run_dummy_step, setup, self._model, dummy_steps=dummy_steps))

    def open(self, memory: StepMemory) -> None:
        super().open(memory)
        setup, config, device = self._setup, self._setup.config, self._setup.torch_device
        self._max_model_len = memory.history.shape[1]
        shape = len(memory.kv_caches), config.max_num_seqs, -(-self._max_model_len // setup.block_size)
        self._tables = torch.zeros(shape, dtype=torch.int32, device=device)
        if not can_capture(setup):
            return
        if not setup.model.stage.is_first:
            tokens = max(shape.tokens for shape in graph_shapes(setup))
            self._hidden = torch.zeros(tokens, setup.model.hidden_size, dtype=setup.dtype, device=device)
        self.graphs = (CudaGraphs if exchange_of(setup.tp) is None else SharedGraphs)(
            setup.device,
            self._compute,
            self._tables,
            memory,
            budget_bytes=int(config.of(KernelOptions).cuda_graph_memory_gib * 2**30),
            tp=setup.tp.all_engines,
        )

    def start(self, run: Run) -> None:
        """Run steps of every kind, so that no request waits for a kernel to compile, and capture the graphs. A pipeline
        stage alone cannot compute whole steps, so what no graph has is compiled in the first real ones."""
        started, model = time.perf_counter(), self._setup.model
        if model.head == "lm" and model.stage.is_whole:
            for plan in warm_up_plans(self._setup.config, self._max_model_len, model.vocab_size):
                run(plan)
        self.capture()
        logger.info("warmed up seconds=%.1f", time.perf_counter() - started)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the graphs of steps, if steps can run as graphs."""
        self.graphs.capture(graph_shapes(self._setup))

    def prepare(
        self, plan: StepPlan, layout: StepLayout, rows: BatchRows, tables: np.ndarray, staged: StagedCopy
    ) -> GPUStep:
        unpadded = self._unpadded(plan, layout, rows) if layout.fits_graph else None
        step = GPUStep(BlockTableRows.of(plan.blocks, tables, rows.sequences.slots, rows.width, staged), unpadded)
        shape = None if unpadded is None else self.graphs.shape_for(*unpadded.size)
        return step if shape is None else step.as_graph(shape, staged)

    def begin(self, inputs: StepInputs) -> None:
        assert isinstance(inputs.prepared, GPUStep)
        tables = inputs.prepared.block_tables
        tables.apply(self._tables)
        if inputs.batch is not None:
            tables.give(self._tables, inputs.batch)

    def run(self, step: Forward) -> Tensor:
        assert isinstance(step.inputs.prepared, GPUStep)
        if (graph := step.inputs.prepared.graph) is None:
            return super().run(step)
        num_tokens = len(step.inputs.token_index)
        if step.hidden is not None and self._hidden is not None:
            self._hidden[:num_tokens] = step.hidden
        return self.graphs.run(*graph)[:num_tokens]  # without padding

    def _compute(self, ids: Tensor, batch: Batch) -> Tensor:
        """Return what a graph computes: hidden states [tokens, hidden] for token ids [tokens] int64."""
        if self._hidden is None:
            return self._model(ids, batch)
        return self._model.run_layers(self._hidden[: len(ids)], batch)

    def _unpadded(self, plan: StepPlan, layout: StepLayout, rows: BatchRows) -> UnpaddedStep:
        """Return what a graph of any shape needs."""
        states, slots = plan.record(StateStep), rows.sequences.slots
        return UnpaddedStep(
            token_index=layout.token_index,
            positions=layout.rotary,
            slot_mappings=layout.slot_mappings,
            slots=slots,
            counts=rows.sequences.counts,
            kv_len=rows.sequences.ends,
            query_start=rows.query_start,
            saves=None if states is None else self._memory.of[StateStep.part].saves(slots, states.saved),
        )
