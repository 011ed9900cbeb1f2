"""Runs step plans on one rank of a pipeline stage."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from engine.config import EngineConfig
from engine.device import DeviceEvent, copy_to
from engine.distributed.shard_plan import ShardPlan
from engine.distributed.stages.stage_group import StageGroup
from engine.distributed.stages.step_results import ResultReceiver, ResultSender
from engine.distributed.tp_group import COLLECTIVE_TIMEOUT_S, ConnectedGroup, TPGroup
from engine.errors import ConfigError, EngineUnavailable, StartupError
from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.config_parts.stage import EMBEDDINGS, LAYER
from engine.model.loader import checkpoint_shards
from engine.model.models.registry import build_model
from engine.model.stage import check_stages, config_of, divide, nth_stage, parse_layers
from engine.model.tensor_names import HEADS
from engine.runner.cuda_graphs import CudaGraphs
from engine.runner.drafting import Proposals
from engine.runner.graphs.choice import graph_shapes
from engine.runner.inputs import StepInputs
from engine.runner.model_runner import LaunchedStep, ModelRunner
from engine.runner.stages.stage_times import BusyTime, Seconds, WorkingTime
from engine.spec_decode.open_drafter import target_layers
from engine.wire.plan import SampledStep, StepPlan, StepResult
from engine.wire.stats.engine_stats import StageStats

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


class StageRunner(ModelRunner):
    """The layers, KV cache and sequence state of one rank of a stage.

    The first stage embeds tokens, so it needs those that the last stage samples. It gets them with the plans, or on
    rank 0 with the result. They are written to the history before the next step is launched.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        folder: Path,
        all_ranks: ConnectedGroup,
        engine: TPGroup | None = None,
    ):
        """all_ranks: of this engine. engine: the same ranks as one of several engines that share experts. Every rank
        has to call this within `all_ranks.starting()`. Raises StartupError."""
        check_stages(config, model_config)
        aux_layers = target_layers(config, model_config)
        self.group = group = StageGroup(all_ranks, config.pipeline_parallel_size, engine, 1 + len(aux_layers))
        self._layers = layers = find_layers(config, model_config, group)
        self.stage = nth_stage(group.stage, layers, model_config)
        self.layout = f" stages={','.join(map(str, layers))}"
        self.samples, self.launches_ahead, self.max_steps = group.is_last, False, 1 + group.stages
        #: Columns that earlier stages add to the hidden states, for the drafter.
        self._added_size = sum(i < self.stage.first for i in aux_layers) * model_config.hidden_size
        self._learned: deque[SampledStep] = deque()
        self._unknown: dict[int, UnknownTokens] = {}
        self._busy, self._working, self._waits = BusyTime(), WorkingTime(), list[Seconds]()
        self._waited_s = [0.0] * len(layers)
        super().__init__(config, config_of(self.stage, model_config), folder, group)
        self._results: ResultReceiver | ResultSender
        self._results = ResultReceiver(group) if all_ranks.rank == 0 else ResultSender(group)

    def _open_graphs(self) -> None:
        super()._open_graphs()
        if isinstance(self.graphs, CudaGraphs) and not self.group.is_first:
            tokens = max(shape.tokens for shape in graph_shapes(self.setup))
            #: Where graphs read the hidden states of the stage before.
            self._graph_x = torch.zeros(
                tokens, self.model_config.hidden_size, dtype=self.dtype, device=self.device.torch_device
            )

    def _compute(self, ids: Tensor, batch: Batch) -> Tensor:
        if self.group.is_first:
            return super()._compute(ids, batch)
        return self.model.run_layers(self._graph_x[: len(ids)], batch)

    def learn(self, sampled: Sequence[SampledStep]) -> None:
        if self.group.is_first:
            self._learned.extend(sampled)

    def prepare(self, plan: StepPlan) -> StepInputs:
        self._working.begin()
        return super().prepare(plan)

    @torch.inference_mode()
    def launch(self, inputs: StepInputs) -> LaunchedStep:
        if self.group.is_first:
            self._write_learned()
            added = {new.slot for new in inputs.added}
            for unknown in self._unknown.values():
                unknown.replaced |= added
            if inputs.entries:
                self._unknown[inputs.plan.step] = UnknownTokens(inputs.plan.slots, inputs.entries, inputs.written)
        self._waits = []
        launched, whole = self.device.timed(partial(super().launch, inputs))
        self._busy.launched(inputs.plan.step, whole, self._waits)
        return launched

    def collect(self, launched: LaunchedStep) -> StepResult:
        results, step = self._results, launched.inputs.plan.step
        if isinstance(results, ResultReceiver):
            launched.event.wait()
            result = results.take(step)
            results.busy_s[0] = self._busy.before(step)
            self._working.end()
            self.learn([SampledStep(step, result.tokens)])
            return result
        if self.samples:
            result = super().collect(launched)
        else:
            launched.event.wait()
            result = StepResult(step=step, tokens=[], logprobs=[], prompt_logprobs=[])
        result = replace(result, stage=self.group.stage, busy_s=self._busy.before(step))
        if self.tp.rank == 0:
            results.send(result)
        return result

    def stages(self) -> list[StageStats]:
        assert isinstance(self._results, ResultReceiver)
        found = []
        for i, (layers, busy_s) in enumerate(zip(self._layers, self._results.busy_s, strict=True)):
            self._waited_s[i] = max(self._waited_s[i], self._working.total_s - busy_s)  # a total never decreases
            found.append(StageStats(layers=layers, ranks=self.tp.size, busy_s=busy_s, wait_s=self._waited_s[i]))
        return found

    def close(self) -> None:
        self._results.close()
        super().close()

    def _write_learned(self) -> None:
        """Write the tokens of earlier steps to the history."""
        history = self._history.view(-1)
        while self._learned:
            step, tokens = self._learned.popleft()
            unknown = self._unknown.pop(step, None)
            if unknown is not None:
                unknown.write(tokens, history)

    def _forward(self, inputs: StepInputs, history: Tensor) -> Tensor:
        link, tokens = self.group.link, len(inputs.token_index)
        if self.group.is_first:
            hidden = super()._forward(inputs, history)[:tokens]  # a graph's output has padding rows
        else:
            size = self.model_config.hidden_size
            receive = partial(link.receive, tokens, size + self._added_size, self.dtype, self.device.torch_device)
            x, added = self._wait_for(receive).split((size, self._added_size), dim=-1)
            hidden = self._run_layers(x.contiguous(), inputs)
            if self.samples and self.drafting.drafter is None:
                hidden = hidden[:, :size]
            elif self._added_size:
                hidden = torch.cat((hidden[:, :size], added, hidden[:, size:]), dim=-1)
        if not self.group.is_last:
            self._wait_for(partial(link.send, hidden))
        return hidden

    def _run_layers(self, x: Tensor, inputs: StepInputs) -> Tensor:
        """Return the output of this stage's layers for that of the stage before, x [tokens, hidden]."""
        if inputs.batch is not None:
            inputs.block_tables.give(self._tables, inputs.batch)
        if inputs.graph is not None:
            self._graph_x[: len(x)] = x
            return self.graphs.run(*inputs.graph)[: len(x)]
        assert inputs.batch is not None
        batch = self._encoder_cache.place(inputs.batch, inputs.image_rows, inputs.rotary_positions)
        graph = None if batch.has_images else self._step_graph
        return self.model.run_layers(x, batch) if graph is None else graph.run(x, batch)

    def _wait_for(self, call: Callable[[], T]) -> T:
        """Return the result of a call of the link. Its time does not count as computing."""
        result, seconds = self.device.timed(call)
        self._waits.append(seconds)
        return result

    def _finish(self, out: Tensor, inputs: StepInputs, history: Tensor) -> LaunchedStep:
        if self.samples:
            return super()._finish(out, inputs, history)
        event = self.device.event()
        if isinstance(self._results, ResultReceiver):
            event = ResultEvent(self._results, inputs.plan.step)
        return LaunchedStep(
            inputs=inputs,
            tokens=inputs.written,
            logprobs=None,
            prompt_logprobs=[],
            pooled=[],
            proposals=Proposals(event),
        )

    def _warm_up(self) -> None:
        """Capture the graphs. A stage alone cannot compute whole steps, so on a GPU the kernels for sampling, and those
        of steps without a graph, are compiled in the first real ones."""
        if self.device.asynchronous:
            self.capture()


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
