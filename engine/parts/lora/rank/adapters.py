"""Adapters on a rank: slots in its layers, the adapter of each row of a step, and a loader beside the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.devices.device import StagedCopy
from engine.lora.adapter_loader import AdapterLoader
from engine.lora.layers import LinearAdapters
from engine.lora.messages import AdapterAnswer, AdapterLoad, SequenceAdapter
from engine.lora.model_adapters import ModelAdapters
from engine.model.low_rank import row_table
from engine.model.models.llama import Model
from engine.model.ops.lora.low_rank import add_plain
from engine.runner.rank_part import RankPart
from engine.runner.rank_setup import RankSetup
from engine.runner.step import Forward
from engine.runner.step_layout import StepLayout
from engine.wire.plan import StepPlan


class Adapters(RankPart):
    name = "lora"

    def __init__(self, setup: RankSetup):
        self._setup = setup
        self.loader: AdapterLoader | None = None
        #: The adapter's slot of the sequence in each slot; -1 for none.
        self._of_sequences = np.full(setup.config.max_num_seqs, -1, dtype=np.int32)
        self._loading = 0

    @property
    def busy(self) -> bool:
        return self._loading > 0

    def extend(self, model: Model) -> None:
        """Give the model's linear layers slots for adapters, and open the loader that fills them."""
        config = self._setup.config.of(EngineConfig)
        self._adapters = ModelAdapters(
            model,
            config.lora_slots,
            config.max_lora_rank,
            config.max_num_batched_tokens,
            self._setup.torch_device,
            stage=self._setup.model.stage,
        )
        self._rows = self._adapters.rows
        self.loader = AdapterLoader(self._adapters, config.max_cpu_loras or config.lora_slots, self._setup.device)

    def prepare(self, plan: StepPlan, layout: StepLayout, staged: StagedCopy) -> Tensor | None:
        """Return the table of `row_table`; None if no token has an adapter."""
        for new in plan.added:
            adapter = new.record(SequenceAdapter)
            self._of_sequences[new.slot] = -1 if adapter is None else adapter.slot
        of_sequences = self._of_sequences[layout.sequences.slots]
        if of_sequences.max(initial=-1) < 0:
            return None
        return staged.add(row_table(of_sequences[layout.entry], self._rows.tile_rows))

    def before(self, step: Forward) -> None:
        self._rows.begin(step.inputs.of.get(self.name))

    @staticmethod
    def twins() -> dict[Callable[..., Any], Callable[..., Any]]:
        from engine.model.ops.gpu import low_rank  # needs Triton

        return {low_rank.add: add_plain}

    def added(self) -> list[LinearAdapters]:
        return self._adapters.linear

    def fill(self) -> None:
        for layer in self._adapters.linear:
            generator = torch.Generator(layer.weights.a.device).manual_seed(0)
            layer.weights.a.normal_(std=0.1, generator=generator)
            layer.weights.b.normal_(std=0.1, generator=generator)
            layer.weights.ranks.fill_(layer.weights.rank)

    def use(self) -> SequenceAdapter:
        return SequenceAdapter(0)

    def obey(self, command: msgspec.Raw) -> None:
        assert self.loader is not None
        self.loader.load(msgspec.msgpack.decode(command, type=AdapterLoad))
        self._loading += 1

    def answers(self) -> Iterable[AdapterAnswer]:
        found = [] if self.loader is None else self.loader.answers()
        self._loading -= len(found)
        return found

    def close(self) -> None:
        if self.loader is not None:
            self.loader.close()
