"""Runs step plans on one rank: builds the inputs, computes the model, samples.

On a GPU, only `collect` waits for the device. Inputs are copied to the device once per step; sampled tokens stay there
for the next step, and are also copied to the host. So step n+1 is in the device's queue before step n has ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops import sampling
from engine.model.ops.sampling_plain import mark_non_finite
from engine.model.state import StateCache
from engine.runner import kv_cache
from engine.runner.cuda_graphs import CudaGraphs, NoGraphs
from engine.runner.graphs.choice import can_capture, graph_shapes, kind_of_graphs, record_cpu_steps
from engine.runner.inputs import InputBuilder
from engine.runner.load import compile_model, load_model
from engine.runner.memory import plan_blocks
from engine.runner.rank_part import NO_PARTS, RankParts
from engine.runner.rank_setup import RankSetup, set_threads
from engine.runner.sampler import LogitOps, LogprobTable, logprob_table, process_rows
from engine.runner.step import Forward, LaunchedStep, PromptLogprobRows, StepInputs
from engine.runner.step_memory import StepMemory
from engine.runner.warm_up import run_dummy_step, warm_up_plans
from engine.wire.plan import SampledStep, StepPlan, StepResult

if TYPE_CHECKING:
    from engine.model.ops.cpu.step_graph import StepGraph

logger = logging.getLogger(__name__)

PROMPT_LOGPROB_ROWS = 256  # rows of [vocab] float32 in memory at a time


class ModelRunner:
    """The model, KV cache and sequence state of one rank.

    `prepare` and `launch` may run in two different threads, each called in the order of the plans: `prepare` owns the
    host's block tables, `launch` the tensors on the device.
    """

    def __init__(self, setup: RankSetup, parts: RankParts = NO_PARTS):
        """Load the model. Every rank has to call this within `starting` of their group. Raises StartupError."""
        config, model_config, tp, device = setup.config, setup.model, setup.tp, setup.torch_device
        self.setup, self.parts, self.config, self.model_config, self.tp = setup, parts, config, model_config, tp
        self.device, self.overlap, self.block_size = setup.device, setup.overlap, setup.block_size
        self.dtype, self.kv_dtype, groups = setup.dtype, setup.kv_dtype, model_config.kv_groups
        stage = model_config.stage
        self.samples = stage.is_last  #: whether this rank samples the tokens itself
        #: whether a GPU may have the next step before `collect` of this one
        self.launches_ahead = self.overlap and self.device.asynchronous and stage.is_whole
        self.max_steps = 1 + config.pipeline_parallel_size  #: that may be launched and not collected, with overlap
        set_threads(config, tp)
        self.kv_scales: list[Tensor | None] = [None] * len(groups)
        if self.kv_dtype == torch.float8_e4m3fn:
            scales = kv_cache.read_scales(setup.folder, model_config.num_layers, device)
            self.kv_scales = [scales[list(group.layers)] for group in groups]
        self.model = load_model(setup, parts)
        dummy_step = partial(run_dummy_step, setup, self.model, self.kv_scales)
        if config.torch_compile:
            compile_model(setup, self.model, dummy_step)
        for attach in parts.attach:
            attach(self.model)
        memory = plan_blocks(setup, partial(dummy_step, parts=parts), parts)
        self.num_blocks, self.max_model_len, num_snapshots = memory
        self.states = StateCache(setup.state_specs, config.max_num_seqs, num_snapshots, device)
        self.kv_caches = [
            kv_cache.allocate(count, group, self.block_size, dtype=self.kv_dtype, device=device, tp=tp)
            for count, group in zip(self.num_blocks, groups, strict=True)
        ]
        self._history = torch.zeros(config.max_num_seqs, self.max_model_len, dtype=torch.int32, device=device)
        self._memory = StepMemory(self.kv_caches, self.kv_scales, self.states, self._history)
        for allocate in parts.allocate:
            allocate(self._memory)
        self.sample_rows, self.logit_ops = sampling.select(device), LogitOps.select(device)
        self._open_graphs()
        self._inputs = InputBuilder(
            config, model_config, self.device, memory=self._memory, shape_for=self.graphs.shape_for, parts=parts
        )
        self._start()

    def _open_graphs(self) -> None:
        """Create the graphs that replay steps, if possible: CUDA graphs and block tables on a GPU, a graph of kernels
        on a CPU."""
        setup, config, device = self.setup, self.config, self.setup.torch_device
        # the device keeps block tables and is sent changes only: with long contexts, a batch's rows are megabytes
        self._tables = torch.empty(0)
        self.graphs: CudaGraphs | NoGraphs = NoGraphs()
        self._step_graph: StepGraph | None = None
        #: Where graphs read the hidden states of another rank; None on ranks that embed tokens.
        self._graph_hidden: Tensor | None = None
        if not self.device.asynchronous:
            self._step_graph = record_cpu_steps(setup, self.model, self._memory, self.max_model_len)
            return
        shape = len(self.kv_caches), config.max_num_seqs, -(-self.max_model_len // self.block_size)
        self._tables = torch.zeros(shape, dtype=torch.int32, device=device)
        if not can_capture(setup):
            return
        if not self.model_config.stage.is_first:
            tokens = max(shape.tokens for shape in graph_shapes(setup))
            self._graph_hidden = torch.zeros(tokens, self.model_config.hidden_size, dtype=self.dtype, device=device)
        self.graphs = kind_of_graphs(setup)(
            self.device,
            self._compute,
            self._tables,
            self._memory,
            budget_bytes=int(config.cuda_graph_memory_gib * 2**30),
            tp=self.tp.all_engines,
        )

    def _start(self) -> None:
        """On a GPU, run steps of every kind, so that no request waits for a kernel to compile, and capture the graphs.
        Then start the parts. A pipeline stage alone cannot compute whole steps, so what no graph has is compiled in
        the first real ones."""
        started, model = time.perf_counter(), self.model_config
        if self.device.asynchronous:
            if model.head == "lm" and model.stage.is_whole:
                for plan in warm_up_plans(self.config, self.max_model_len, model.vocab_size):
                    self._run(plan)
            self.capture()
        for start in self.parts.start:
            start(self._run, self.graphs)
        if self.device.asynchronous:
            for cache in self.kv_caches:
                cache[:1] = 0  # clear the block that these steps wrote to
            logger.info("warmed up seconds=%.1f", time.perf_counter() - started)

    def _run(self, plan: StepPlan) -> StepResult:
        return self.collect(self.launch(self.prepare(plan)))

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the graphs of steps, if steps can run as graphs."""
        self.graphs.capture(graph_shapes(self.setup))

    def _compute(self, ids: Tensor, batch: Batch) -> Tensor:
        """Return what a graph computes: hidden states [tokens, hidden] for token ids [tokens] int64."""
        if self._graph_hidden is None:
            return self.model(ids, batch)
        return self.model.run_layers(self._graph_hidden[: len(ids)], batch)

    def prepare(self, plan: StepPlan, sampled: Sequence[SampledStep] = ()) -> StepInputs:
        """Build the inputs of a plan. Needs no result of earlier steps. sampled: their tokens, if this rank embeds
        tokens that another rank has sampled."""
        return self._inputs.build(plan, sampled)

    # -- on the device -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, inputs: StepInputs) -> LaunchedStep:
        """Compute a step on a CPU, or put it into a GPU's queue. Steps must come in the order of `prepare`."""
        inputs.staged.send()
        for new in inputs.added:
            self._history[new.slot, : len(new.tokens)] = new.tokens
        inputs.block_tables.apply(self._tables)
        for change in inputs.plan.blocks:
            for block, start in change.cleared:
                self.kv_caches[change.group][block, :, :, :, start:] = 0
        self.states.restore(inputs.plan)
        if inputs.batch is not None:
            inputs.block_tables.give(self._tables, inputs.batch)
        step = Forward(inputs, inputs.batch)
        for before in self.parts.before:
            before(step)
        out = self._forward(step)
        tokens, launched = self._finish(out, inputs)
        for after in self.parts.after:
            after(launched, out, tokens)
        launched.event = launched.early_event or self.device.event()
        return launched

    def _forward(self, step: Forward) -> Tensor:
        """Return hidden states [tokens, hidden], followed by the inputs of `aux_layers`."""
        inputs, hidden, batch = step.inputs, step.hidden, step.batch
        num_tokens = len(inputs.token_index)
        if inputs.graph is not None:
            if hidden is not None and self._graph_hidden is not None:
                self._graph_hidden[:num_tokens] = hidden
            out = self.graphs.run(*inputs.graph)[:num_tokens]  # without padding
        elif hidden is not None:
            assert batch is not None
            out = self._run_layers(hidden, batch)
        else:
            assert batch is not None
            ids = self._history.view(-1)[inputs.token_index].long()
            out = self._run_model(ids, batch, step.embeddings)
        if step.aux is None:
            return out
        size = self.model_config.hidden_size
        return torch.cat((out[:, :size], step.aux, out[:, size:]), dim=-1)

    def _run_model(self, ids: Tensor, batch: Batch, embeddings: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return the output of the model for token ids [tokens] int64. embeddings: see Forward."""
        if embeddings is None and self._step_graph is None:
            return self.model(ids, batch)
        x = self.model.embed(ids)
        if embeddings is not None:
            x = x.index_copy(0, *embeddings)
        return self._run_layers(x, batch, self.model.layer_inputs(ids, x))

    def _run_layers(self, x: Tensor, batch: Batch, inputs: Sequence[Tensor] = ()) -> Tensor:
        """Return the output of the layers for x [tokens, hidden]. inputs: as in `run_layers` of the model."""
        if self._step_graph is not None and not batch.has_images:
            return self._step_graph.run(x, batch)
        return self.model.run_layers(x, batch, inputs)

    def _finish(self, out: Tensor, inputs: StepInputs) -> tuple[Tensor, LaunchedStep]:
        """Sample from the output of `_forward`, and write the tokens to the history. Returns the tokens [n] int64 on
        the device, and the step."""
        if not self.samples:
            return inputs.written, LaunchedStep(inputs, inputs.written)
        hidden = out[:, : self.model_config.hidden_size]
        tokens, logprobs = self._sample(hidden, inputs)
        # -1 ends a request, but with overlap the next step may already read this token, and needs a valid id
        self._history.view(-1)[inputs.written] = tokens.clamp(min=0).int()
        prompt_logprobs = [(rows, self._prompt_logprobs(hidden, rows)) for rows in inputs.prompt_logprob_rows]
        return tokens, LaunchedStep(inputs, self.device.fetch(tokens), logprobs, prompt_logprobs)

    def collect(self, launched: LaunchedStep) -> StepResult:
        """Wait for a launched step and return its result. Raises EngineUnavailable if the result is of another rank,
        and does not come."""
        launched.event.wait()
        result = self._result(launched)
        for collected in self.parts.collected:
            result = collected(launched, result)
        return result

    def _result(self, launched: LaunchedStep) -> StepResult:
        """Return the result of a step that the device has computed, as far as this rank has it."""
        inputs = launched.inputs
        if not self.samples:
            return StepResult(step=inputs.plan.step, tokens=[], logprobs=[], prompt_logprobs=[])
        count, sampled = len(inputs.plan.slots), launched.tokens.tolist()
        each_one = len(sampled) == count and not inputs.plan.drafts  # as in most steps
        result = StepResult(
            step=inputs.plan.step,
            tokens=[[token] for token in sampled] if each_one else [[] for _ in range(count)],
            logprobs=[None] * count,
            prompt_logprobs=[None] * count,
        )
        if not each_one:
            for i, token in zip(inputs.entries, sampled, strict=True):
                result.tokens[i].append(token)
        if launched.logprobs is not None:
            entries, counts, table = launched.logprobs
            for i, logprob in zip(entries, table.rows(counts), strict=True):
                result.logprobs[i] = [*(result.logprobs[i] or ()), logprob]
        for rows, tables in launched.prompt_logprobs:
            result.prompt_logprobs[rows.entry] = [
                value for table in tables for value in table.rows([rows.count] * len(table.tokens))
            ]
        return result

    def close(self) -> None:
        """End the threads and connections of parts. The group of ranks is closed by its owner."""
        for close in self.parts.close:
            close()

    def _sample(
        self, hidden: Tensor, inputs: StepInputs
    ) -> tuple[Tensor, tuple[list[int], list[int], LogprobTable] | None]:
        """Return the sampled tokens [n] int64, and the log-probabilities that were requested."""
        if not inputs.entries:
            return inputs.sampled_rows, None
        work = inputs.sampling
        if work.plain:
            return mark_non_finite(*self.model.best(hidden[inputs.sampled_rows])), None
        logits = self.model.logits(hidden[inputs.sampled_rows])
        asked = work.logprobs
        raw = None if asked is None else logits.index_select(0, asked.rows)
        process_rows(logits, work, self._history, self.logit_ops)
        tokens = self.sample_rows(logits, work.random)
        if asked is None or raw is None:
            return tokens, None
        chosen = tokens.index_select(0, asked.rows).clamp(min=0)
        counts = list(asked.counts.values())
        table = logprob_table(raw, chosen, max(counts)).fetched(self.device.fetch)
        return tokens, ([inputs.entries[row] for row in asked.counts], counts, table)

    def _prompt_logprobs(self, hidden: Tensor, rows: PromptLogprobRows) -> list[LogprobTable]:
        targets = self._history.view(-1)[rows.targets].long()
        tables = []
        for start in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            wanted = targets[start : start + PROMPT_LOGPROB_ROWS]
            first = rows.first_row + start
            logits = self.model.logits(hidden[first : first + len(wanted)])
            tables.append(logprob_table(logits, wanted, rows.count).fetched(self.device.fetch))
        return tables
