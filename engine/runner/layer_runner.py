"""Computes the layers of steps, one kernel after another. engine/runner/graphs/ has what computes them as graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor

from engine.devices.device import StagedCopy
from engine.devices.free_memory import FreeMemory
from engine.model.models.llama import Model
from engine.runner.rank_setup import RankSetup
from engine.runner.step import FROM_BATCH, DummyStep, Forward, PreparedStep, StepInputs, StepMemory
from engine.runner.step_layout import BatchRows, StepLayout
from engine.wire.plan import StepPlan

Run = Callable[[StepPlan], object]
"""Computes a step."""


class LayerRunner:
    """Computes the layers of a rank. This base class is that of a CPU."""

    keeps_tables: ClassVar[bool] = False
    """Whether the device keeps block tables; a batch then gets its rows in `begin`."""

    divides_drafts: ClassVar[bool] = True
    """Whether tokens that verify drafts are sequences of their own in a batch."""

    def __init__(self, setup: RankSetup, model: Model):
        """model: with its weights, and all that parts have added to its layers."""
        self._setup, self._model = setup, model

    def free_memory(self, dummy_steps: Sequence[Callable[[DummyStep], None]]) -> FreeMemory:
        """Return the memory that is free for what a rank keeps of sequences. dummy_steps: compute what parts add to the
        largest step, where memory has to be measured."""
        return self._setup.device.free_memory().shared_by(self._setup.tp.all_engines.local_size)

    def open(self, memory: StepMemory) -> None:
        """The memory of steps is there, and empty."""
        self._memory, self._history = memory, memory.history.view(-1)

    def start(self, run: Run) -> None:
        """Do what the first requests would have to wait for. run: computes a step, whose KV belongs in block 0."""

    def prepare(
        self, plan: StepPlan, layout: StepLayout, rows: BatchRows, tables: np.ndarray, staged: StagedCopy
    ) -> PreparedStep:
        """Return what this needs of a step besides its batch. rows: of the batch. tables: [groups, slots, blocks]
        int32, the host's block tables. Called in the order of plans, not always by the thread that launches steps."""
        return FROM_BATCH

    def begin(self, inputs: StepInputs) -> None:
        """The inputs of the next step are on the device."""

    def run(self, step: Forward) -> Tensor:
        """Return hidden states [tokens, hidden], followed by the inputs of `aux_layers`, valid until the next step."""
        batch = step.batch
        assert batch is not None
        if step.hidden is not None:
            return self._model.run_layers(step.hidden, batch)
        ids = self.token_ids(step)
        if step.embeddings is None:
            return self._model(ids, batch)
        x = self._model.embed(ids).index_copy(0, *step.embeddings)
        return self._model.run_layers(x, batch, self._model.layer_inputs(ids, x))

    def token_ids(self, step: Forward) -> Tensor:
        """Return the input tokens [tokens] int64 of a step."""
        return self._history[step.inputs.token_index].long()
