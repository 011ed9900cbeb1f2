"""A feature's end on a rank, and all of them on one rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import msgspec
from torch import Tensor

from engine.devices.device import StagedCopy
from engine.devices.free_memory import FreeMemory
from engine.distributed.tp_group import TPGroup
from engine.hooks import ByClass, overriding
from engine.model.models.llama import Model
from engine.runner.launcher import Launcher, StepRunner
from engine.runner.layer_runner import LayerRunner, Run
from engine.runner.step import DummyStep, EditLogits, Forward, LaunchedStep, StepMemory
from engine.runner.step_layout import SampledTokens, StepLayout
from engine.wire.part_record import PartRecord
from engine.wire.plan import StepPlan, StepResult


class RankPart:
    """A feature on one rank. The runner calls those of the methods below that a part overrides, in the order in which
    the parts were given to it; `after`, `collected` and `close` in reverse. The others cost nothing."""

    name: ClassVar[str] = ""
    """Its key in StepInputs.of and LaunchedStep.of, and the `part` of its commands and answers."""
    block_bytes: int = 0
    """Device memory that it needs for each block of the first KV cache group."""
    state_bytes: int = 0
    """Of the memory for the KV cache, what it keeps of sequences besides; known after `reserve`."""
    needs_batch: bool = False
    """Whether it reads the batch also of steps that run as graphs."""

    # -- the start: every rank makes these calls in the same order; they raise StartupError ------------------------

    def extend(self, model: Model) -> None:
        """The weights of the model are loaded and packed. Add to its layers."""

    def attach(self, model: Model) -> None:
        """The model is complete. Make what computes beside it."""

    def dummy_step(self, step: DummyStep) -> None:
        """Compute what this part adds to the largest step, so that its memory is measured."""

    def reserve(self, free: FreeMemory) -> FreeMemory:
        """Return what is left of the free memory without what this part will take later. Raises OutOfMemory."""
        return free

    def allocate(self, memory: StepMemory) -> None:
        """The memory that steps share is there; what this part needs beside it was left free."""

    def start(self, run: Run, runner: LayerRunner) -> None:
        """Begin to serve requests. What computes the layers has warmed up; `run` computes another step to warm up,
        whose KV belongs in block 0."""

    # -- a step ----------------------------------------------------------------------------------------------------

    def prepare(self, plan: StepPlan, layout: StepLayout, staged: StagedCopy) -> object:
        """Return what this part needs of a step, which is kept in StepInputs.of; None for nothing. It may change the
        layout. Called in the order of plans, not always by the thread that launches steps."""
        return None

    def edits(self, plan: StepPlan, sampled: SampledTokens, staged: StagedCopy) -> EditLogits | None:
        """Return what changes the logits of the tokens that a step samples, before they are; None for nothing. Called
        after `prepare`."""
        return None

    def before(self, step: Forward) -> None:
        """The model is about to compute a step."""

    def after(self, step: LaunchedStep, out: Tensor, tokens: Tensor) -> None:
        """The model has computed a step, and its tokens are sampled. out: [tokens, columns], hidden states and inputs
        of `aux_layers`, valid until the next step. tokens: [n] int64, as in LaunchedStep, on the device."""

    def collected(self, step: LaunchedStep, result: StepResult) -> StepResult:
        """Return the result of a step that the device has computed, after adding to it."""
        return result

    def launcher(self, runner: StepRunner, group: TPGroup) -> Launcher:
        """Return what launches the steps of this rank. group: the ranks of its engine."""
        raise NotImplementedError

    # -- besides ---------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether an answer to a command will follow soon."""
        return False

    def obey(self, command: msgspec.Raw) -> None:
        """Begin to carry out a command that its end on rank 0 has sent, in msgpack. Called on the other ranks."""

    def answers(self) -> Iterable[PartRecord]:
        """Return what rank 0 is to be told, since the last call."""
        return ()

    def report(self) -> PartRecord | None:
        """Return its figures for EngineStats. Called on rank 0."""
        return None

    def close(self) -> None:
        """End its threads and connections. Called even if the start has failed."""


class RankParts(ByClass[RankPart]):
    """The parts of one rank, and for each method of RankPart those of them that override it, bound."""

    def __init__(self, parts: Sequence[RankPart] = ()):
        super().__init__(parts)
        self.extend = overriding(parts, RankPart.extend)
        self.attach = overriding(parts, RankPart.attach)
        self.dummy_step = overriding(parts, RankPart.dummy_step)
        self.reserve = overriding(parts, RankPart.reserve)
        self.allocate = overriding(parts, RankPart.allocate)
        self.start = overriding(parts, RankPart.start)
        self.prepare = [(part.name, prepare) for part in parts for prepare in overriding([part], RankPart.prepare)]
        self.edits = overriding(parts, RankPart.edits)
        self.before = overriding(parts, RankPart.before)
        self.after = overriding(self.all[::-1], RankPart.after)
        self.collected = overriding(self.all[::-1], RankPart.collected)
        self.obey = {part.name: obey for part in parts for obey in overriding([part], RankPart.obey)}
        self.launcher = overriding(parts, RankPart.launcher)
        self.answers = overriding(parts, RankPart.answers)
        self.report = overriding(parts, RankPart.report)
        self.close = overriding(self.all[::-1], RankPart.close)

    @property
    def busy(self) -> bool:
        return any(part.busy for part in self.all)

    @property
    def block_bytes(self) -> int:
        return sum(part.block_bytes for part in self.all)

    @property
    def state_bytes(self) -> int:
        return sum(part.state_bytes for part in self.all)


NO_PARTS = RankParts()
