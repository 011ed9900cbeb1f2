"""A rank of a pipeline stage: what it receives, sends and measures."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from engine.config import EngineConfig
from engine.devices.device import DeviceEvent, StagedCopy, copy_to
from engine.devices.free_memory import FreeMemory
from engine.distributed.data_parallel.data_parallel_group import DataParallelGroup
from engine.distributed.process_group import COLLECTIVE_TIMEOUT_S
from engine.distributed.tp_group import ConnectedGroup, TPGroup
from engine.errors import ConfigError, EngineUnavailable, StartupError
from engine.model.config import ModelConfig
from engine.model.config_parts.stage import EMBEDDINGS, LAYER
from engine.model.loader import checkpoint_shards
from engine.model.models.registry import build_model
from engine.model.shard import ShardPlan
from engine.model.stage import check_stages, divide, parse_layers
from engine.model.tensor_names import HEADS
from engine.parts.stages.rank.stage_group import StageGroup
from engine.parts.stages.rank.stage_times import BusyTime, Seconds, WorkingTime
from engine.parts.stages.rank.step_results import ResultReceiver, ResultSender
from engine.runner.layer_runner import LayerRunner, Run
from engine.runner.rank_part import RankPart
from engine.runner.rank_setup import RankSetup
from engine.runner.step import Forward, LaunchedStep, StepMemory
from engine.runner.step_layout import StepLayout
from engine.spec_decode.open_drafter import target_layers
from engine.wire.parts.stages import StageReport, StageStats
from engine.wire.plan import SampledStep, StepPlan, StepResult

T = TypeVar("T")


@dataclass(slots=True)
class UnknownTokens:
    """Where the tokens of a step go once they are known."""

    slots: list[int]  #: of the plan's entries
    entries: list[int]  #: as in StepInputs
    written: Tensor  #: as in StepInputs
    replaced: set[int] = field(default_factory=set)
    """Slots that another sequence has taken since."""

    def write(self, tokens: Sequence[Sequence[int]], history: Tensor) -> None:
        """Write tokens, as in SampledStep, to the flattened history. The host does not wait for the device."""
        rows, ids, taken = [], [], [0] * len(tokens)
        for row, entry in enumerate(self.entries):
            place = taken[entry]
            taken[entry] += 1
            if place < len(tokens[entry]) and self.slots[entry] not in self.replaced:
                rows.append(row)
                ids.append(max(0, tokens[entry][place]))
        index, values = copy_to(np.array([rows, ids], dtype=np.int64), history.device)  # int64 even if empty
        history[self.written[index]] = values.int()


class ResultEvent(DeviceEvent):
    """The arrival of a step's result from the last stage."""

    def __init__(self, results: ResultReceiver, step: int):
        self._results, self._step = results, step

    def wait(self) -> None:
        if not self.reached(COLLECTIVE_TIMEOUT_S):
            raise EngineUnavailable(f"no result of step {self._step} in {COLLECTIVE_TIMEOUT_S:.0f} s")

    def reached(self, timeout_s: float) -> bool:
        return self._results.arrived(self._step, timeout_s)


class PipelineStage(RankPart):
    """One rank of a stage: it goes on with the hidden states of the stage before, and sends its own to the next.

    The first stage embeds tokens, so it needs those that the last stage samples. It gets them with the plans, or on
    rank 0 with the result. They are written to the history before the next step is computed.
    """

    name = "stages"

    def __init__(self, setup: RankSetup):
        assert isinstance(setup.tp, StageGroup)
        self._setup, self._group, self._device = setup, setup.tp, setup.device
        self._results: ResultReceiver | ResultSender | None = None
        aux_layers = target_layers(setup.config.of(EngineConfig), setup.whole)
        #: Columns that earlier stages add to the hidden states, for the drafter.
        self._added_size = sum(i < setup.model.stage.first for i in aux_layers) * setup.model.hidden_size
        self._learned: deque[SampledStep] = deque()
        self._unknown: dict[int, UnknownTokens] = {}
        self._busy, self._working, self._waits = BusyTime(), WorkingTime(), list[Seconds]()
        self._waited_s = [0.0] * len(setup.tp.layers)

    def reserve(self, free: FreeMemory) -> FreeMemory:
        """Leave a GPU room for what the link keeps; the largest step, which was measured, sent and received nothing."""
        setup = self._setup
        states = setup.config.max_num_batched_tokens * setup.model.hidden_size * setup.dtype.itemsize
        return free.less(int(self._group.link_copies * states)) if self._device.asynchronous else free

    def allocate(self, memory: StepMemory) -> None:
        self._history = memory.history

    def start(self, run: Run, runner: LayerRunner) -> None:
        group = self._group
        self._results = ResultReceiver(group) if group.all_ranks.rank == 0 else ResultSender(group)

    def prepare(self, plan: StepPlan, layout: StepLayout, staged: StagedCopy) -> None:
        self._working.begin()

    def before(self, step: Forward) -> None:
        inputs, group = step.inputs, self._group
        self._watch = self._device.stopwatch()
        self._waits = []
        if group.is_first:
            self._learned.extend(inputs.sampled)
            added = {new.slot for new in inputs.added}
            for unknown in self._unknown.values():
                unknown.replaced |= added
            self._write_learned()
            if inputs.entries:
                self._unknown[inputs.plan.step] = UnknownTokens(inputs.plan.slots, inputs.entries, inputs.written)
            return
        size, tokens = self._setup.model.hidden_size, len(inputs.token_index)
        dtype, device = self._setup.dtype, self._device.torch_device
        receive = partial(group.link.receive, tokens, size + self._added_size, dtype, device)
        hidden, added_columns = self._wait_for(receive).split((size, self._added_size), dim=-1)
        step.hidden = hidden.contiguous()
        if self._added_size:
            step.aux = added_columns

    def after(self, step: LaunchedStep, out: Tensor, tokens: Tensor) -> None:
        plan = step.inputs.plan
        if not self._group.is_last:
            self._wait_for(partial(self._group.link.send, out))
        self._busy.launched(plan.step, self._watch(), self._waits)
        if isinstance(self._results, ResultReceiver):
            step.early_event = ResultEvent(self._results, plan.step)

    def collected(self, step: LaunchedStep, result: StepResult) -> StepResult:
        results, number = self._results, step.inputs.plan.step
        if isinstance(results, ResultReceiver):
            result = results.take(number)
            results.busy_s[0] = self._busy.before(number)
            self._working.end()
            self._learned.append(SampledStep(number, result.tokens))
            return result
        assert results is not None
        result = structs.replace(result, stage=self._group.stage, busy_s=self._busy.before(number))
        if self._group.rank == 0:
            results.send(result)
        return result

    def report(self) -> StageReport:
        assert isinstance(self._results, ResultReceiver)
        found = []
        for i, (layers, busy_s) in enumerate(zip(self._group.layers, self._results.busy_s, strict=True)):
            self._waited_s[i] = max(self._waited_s[i], self._working.total_s - busy_s)  # a total never decreases
            found.append(StageStats(layers=layers, ranks=self._group.size, busy_s=busy_s, wait_s=self._waited_s[i]))
        return StageReport(found)

    def close(self) -> None:
        if self._results is not None:
            self._results.close()

    def _write_learned(self) -> None:
        """Write the tokens of earlier steps to the history."""
        history = self._history.view(-1)
        while self._learned:
            step, tokens = self._learned.popleft()
            unknown = self._unknown.pop(step, None)
            if unknown is not None:
                unknown.write(tokens, history)

    def _wait_for(self, call: Callable[[], T]) -> T:
        """Return the result of a call of the link. Its time does not count as computing."""
        result, seconds = self._device.timed(call)
        self._waits.append(seconds)
        return result


def join_stage(config: EngineConfig, model: ModelConfig, group: TPGroup) -> StageGroup:
    """Connect the ranks of a pipeline. Returns those of this rank's stage. group: all ranks of the engine. Every rank
    has to call this within `group.starting()`. Raises StartupError."""
    check_stages(config, model)
    ranks = group.own if isinstance(group, DataParallelGroup) else group
    assert isinstance(ranks, ConnectedGroup)
    stages = StageGroup(ranks, config.pipeline_parallel_size, group, 1 + len(target_layers(config, model)))
    stages.layers = find_layers(config, model, stages)
    return stages


def find_layers(config: EngineConfig, model: ModelConfig, group: StageGroup) -> list[int]:
    """Return the number of layers of each stage. Raises StartupError if the ranks disagree."""
    layers = divide_layers(config, model)
    found = set(group.exchange(",".join(map(str, layers))))
    if len(found) > 1:
        raise StartupError(f"the ranks divide the model into different stages: {' and '.join(sorted(found))}")
    return layers


def divide_layers(config: EngineConfig, model: ModelConfig) -> list[int]:
    """Return the number of layers of each stage: the configured ones, else with about equal weights. Raises
    ConfigError."""
    layers = parse_layers(config, model.num_layers)
    if layers is None:
        costs, head = layer_bytes(model)
        layers = divide(costs, config.pipeline_parallel_size, head)
    needed = 1 if model.vision is None else model.vision.deepstack
    if layers[0] < needed:
        limit = f"numbers of which the first is at least {needed}: the first layers add to the embeddings of images"
        raise ConfigError("pipeline_layers", ",".join(map(str, layers)), limit)
    return layers


def layer_bytes(model: ModelConfig) -> tuple[list[float], float]:
    """Return the bytes of weights of each layer, and of the head, over all ranks together. Loads nothing."""
    built = build_model(model, ShardPlan(), getattr(torch, model.dtype), "meta")
    layers, head = [0.0] * model.num_layers, 0.0
    for name, parts in checkpoint_shards(built).items():
        size = sum(target.nbytes for _, target in parts)
        if layer := LAYER.match(name):
            layers[int(layer[1])] += size
        elif name.startswith(HEADS) or (name in EMBEDDINGS and model.tie_word_embeddings):
            head += size
    return layers, head
