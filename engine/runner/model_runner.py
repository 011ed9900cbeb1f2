"""Runs step plans on one rank: builds the inputs, computes the model, samples.

On a GPU, only `collect` waits for the device. Inputs are copied to the device once per step; sampled tokens stay there
for the next step, and are also copied to the host. So step n+1 is in the device's queue before step n has ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.device import DeviceEvent
from engine.distributed.tp_group import TPGroup
from engine.eplb.open_experts import open_experts
from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.low_rank import AdapterRows
from engine.model.ops import sampling
from engine.model.ops.sampling_plain import mark_non_finite
from engine.model.state import StateCache
from engine.runner import kv_cache
from engine.runner.cuda_graphs import CudaGraphs, NoGraphs
from engine.runner.drafting import Proposals
from engine.runner.graphs.choice import can_capture, graph_shapes, kind_of_graphs, record_cpu_steps
from engine.runner.images import open_encoder_cache
from engine.runner.inputs import InputBuilder, PromptLogprobRows, StepInputs
from engine.runner.load import allocate_inbox, compile_model, load_adapters, load_drafter, load_model
from engine.runner.memory import plan_blocks
from engine.runner.pooler import Pooled, Pooler
from engine.runner.rank_setup import RankSetup, set_threads
from engine.runner.sampler import LogitOps, LogprobTable, logprob_table, process_rows
from engine.runner.step_memory import StepMemory
from engine.runner.warm_up import run_dummy_step, warm_up_plans
from engine.wire.plan import SampledStep, StepPlan, StepResult
from engine.wire.stats.engine_stats import StageStats

if TYPE_CHECKING:
    from engine.model.ops.cpu.step_graph import StepGraph

logger = logging.getLogger(__name__)

PROMPT_LOGPROB_ROWS = 256  # rows of [vocab] float32 in memory at a time


@dataclass(slots=True)
class LaunchedStep:
    """A step in the device's queue. Its results are in host memory once `event` has happened."""

    inputs: StepInputs
    tokens: Tensor  #: [n] int64, the sampled tokens, in the order of `inputs.entries`
    logprobs: tuple[list[int], list[int], LogprobTable] | None  #: entries, number of alternatives of each, their table
    prompt_logprobs: list[tuple[PromptLogprobRows, list[LogprobTable]]]  #: one table per PROMPT_LOGPROB_ROWS rows
    pooled: list[Pooled]
    proposals: Proposals

    @property
    def event(self) -> DeviceEvent:
        return self.proposals.event


class ModelRunner:
    """The model, KV cache and sequence state of one rank.

    `prepare` and `launch` may run in two different threads, each called in the order of the plans: `prepare` owns the
    host's block tables, `launch` the tensors on the device.
    """

    layout = ""  #: suffix of the fingerprint of its KV, for engines whose ranks hold other layers than those of others
    samples = True  #: whether this rank samples the tokens itself
    launches_ahead = True  #: whether, with overlap, a GPU may have the next step before `collect` of this one
    max_steps = 2  #: steps that may be launched and not collected, with overlap

    def __init__(self, config: EngineConfig, model_config: ModelConfig, folder: Path, tp: TPGroup):
        self.config, self.model_config, self.tp = config, model_config, tp
        self.setup = setup = RankSetup.of(config, model_config, folder, tp)
        self.device, self.overlap, self.block_size = setup.device, setup.overlap, setup.block_size
        self.dtype, self.kv_dtype, device = setup.dtype, setup.kv_dtype, setup.torch_device
        set_threads(config, tp)
        groups = model_config.kv_groups
        self.kv_scales: list[Tensor | None] = [None] * len(groups)
        if self.kv_dtype == torch.float8_e4m3fn:
            scales = kv_cache.read_scales(folder, model_config.num_layers, device)
            self.kv_scales = [scales[list(group.layers)] for group in groups]
        self.model = load_model(setup)
        self.adapter_loader = load_adapters(setup, self.model)
        self._adapter_rows = self.adapter_loader.rows if self.adapter_loader else AdapterRows(0, device)
        self._encoder_cache = open_encoder_cache(
            self.model, model_config, self.dtype, device, together=self.device.asynchronous
        )
        self.image_inbox = allocate_inbox(setup)
        self._pooler = Pooler(model_config, self.model, folder, dtype=self.dtype, device=self.device)
        dummy_step = partial(run_dummy_step, setup, self.model, self.kv_scales)
        if config.torch_compile:
            compile_model(setup, self.model, dummy_step)
        self.experts = open_experts(config, self.model, tp, self.device)  # now, to count no tokens of larger steps
        self.drafting = load_drafter(setup, self.model)
        largest_step = partial(dummy_step, drafter=self.drafting.drafter)
        sizes = self.drafting.block_bytes, self.experts.spare_bytes
        memory = plan_blocks(setup, largest_step, self._encoder_cache, *sizes)
        self.num_blocks, self.max_model_len, num_snapshots = memory
        self.states = StateCache(setup.state_specs, config.max_num_seqs, num_snapshots, device)
        self.kv_caches = [
            kv_cache.allocate(count, group, self.block_size, dtype=self.kv_dtype, device=device, tp=tp)
            for count, group in zip(self.num_blocks, groups, strict=True)
        ]
        self._memory = StepMemory(self.kv_caches, self.kv_scales, self.states)
        self.drafting.allocate(self.num_blocks[0])
        self.sample_rows, self.logit_ops = sampling.select(device), LogitOps.select(device)
        self._history = torch.zeros(config.max_num_seqs, self.max_model_len, dtype=torch.int32, device=device)
        self._open_graphs()
        self._inputs = InputBuilder(
            config,
            model_config,
            self.device,
            memory=self._memory,
            max_model_len=self.max_model_len,
            shape_for=self.graphs.shape_for,
            drafts=self.drafting.drafter is not None,
            adapter_tile_rows=self._adapter_rows.tile_rows,
        )
        self._warm_up()
        self.experts.reset()

    def _open_graphs(self) -> None:
        """Create the graphs that replay steps, if possible: CUDA graphs and block tables on a GPU, a graph of kernels
        on a CPU."""
        setup, config = self.setup, self.config
        # the device keeps block tables and is sent changes only: with long contexts, a batch's rows are megabytes
        self._tables = torch.empty(0)
        self.graphs: CudaGraphs | NoGraphs = NoGraphs()
        self._step_graph: StepGraph | None = None
        if not self.device.asynchronous:
            self._step_graph = record_cpu_steps(setup, self.model, self._memory, self.max_model_len)
            return
        shape = len(self.kv_caches), config.max_num_seqs, -(-self.max_model_len // self.block_size)
        self._tables = torch.zeros(shape, dtype=torch.int32, device=setup.torch_device)
        if can_capture(setup):
            self.graphs = kind_of_graphs(setup)(
                self.device,
                self._compute,
                self._history,
                self._tables,
                self._memory,
                budget_bytes=int(config.cuda_graph_memory_gib * 2**30),
                tp=self.tp.all_engines,
            )

    def _warm_up(self) -> None:
        """Run steps of every kind on a GPU, so that no request waits for a kernel to compile; capture the graphs."""
        if not self.device.asynchronous:
            return
        started = time.perf_counter()
        if self.model_config.head == "lm":
            sizes = self.config, self.max_model_len, self.model_config.vision, self.model_config.vocab_size
            for plan in warm_up_plans(*sizes):
                self.collect(self.launch(self.prepare(plan)))
            for cache in self.kv_caches:
                cache[0] = 0  # clear the block that these steps wrote to
        self.capture()
        logger.info("warmed up seconds=%.1f", time.perf_counter() - started)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the graphs of steps and of the drafter, if steps can run as graphs."""
        self.graphs.capture(graph_shapes(self.setup))
        self.drafting.capture(self.graphs, -(-self.max_model_len // self.block_size))

    def _compute(self, ids: Tensor, batch: Batch) -> Tensor:
        """Return what a graph computes: hidden states [tokens, hidden] for token ids [tokens] int64."""
        return self.model(ids, batch)

    def prepare(self, plan: StepPlan) -> StepInputs:
        """Build the inputs of a plan. Needs no result of earlier steps."""
        return self._inputs.build(plan)

    # -- on the device -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, inputs: StepInputs) -> LaunchedStep:
        """Compute a step on a CPU, or put it into a GPU's queue. Steps must come in the order of `prepare`."""
        inputs.staged.send()
        history = self._history.view(-1)
        for new in inputs.added:
            self._history[new.slot, : len(new.tokens)] = new.tokens
        if inputs.drafted is not None:
            self.drafting.fill(inputs.drafted)
            history[inputs.drafted.written] = inputs.drafted.tokens
        inputs.block_tables.apply(self._tables)
        for change in inputs.plan.blocks:
            for block, start in change.cleared:
                self.kv_caches[change.group][block, :, :, :, start:] = 0
        self.states.restore(inputs.plan.restored)
        self._adapter_rows.begin(inputs.adapter_rows)
        self.experts.begin(inputs.plan.experts, inputs.plan.num_tokens)
        self._encoder_cache.update(inputs.plan, self.image_inbox, inputs.received_blocks)
        return self._finish(self._forward(inputs, history), inputs, history)

    def _finish(self, out: Tensor, inputs: StepInputs, history: Tensor) -> LaunchedStep:
        """Sample from the output of `_forward`, write the tokens to the history, pool, and draft."""
        hidden = self.drafting.hidden(out)
        tokens, logprobs = self._sample(hidden, inputs)
        # -1 ends a request, but with overlap the next step may already read this token, and needs a valid id
        history[inputs.written] = tokens.clamp(min=0).int()
        prompt_logprobs = [(rows, self._prompt_logprobs(hidden, rows)) for rows in inputs.prompt_logprob_rows]
        pooled = self._pooler.launch(hidden, inputs.pooled_rows) if inputs.pooled_rows else []
        return LaunchedStep(
            inputs=inputs,
            tokens=self.device.fetch(tokens),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            pooled=pooled,
            proposals=self.drafting.propose(inputs, tokens, self._history, out),
        )

    def _forward(self, inputs: StepInputs, history: Tensor) -> Tensor:
        """Return hidden states [tokens, hidden], followed by the inputs of `aux_layers`. history: flattened."""
        if inputs.batch is not None:
            inputs.block_tables.give(self._tables, inputs.batch)
        if inputs.graph is not None:
            return self.graphs.run(*inputs.graph)
        assert inputs.batch is not None
        ids = history[inputs.token_index].long()
        x, batch = self._encoder_cache.embed(ids, inputs.batch, inputs.image_rows, inputs.rotary_positions)
        if self._step_graph is not None and not batch.has_images:
            return self._step_graph.run(self.model.embed(ids) if x is None else x, batch)
        if x is None:
            return self.model(ids, batch)
        return self.model.run_layers(x, batch, self.model.layer_inputs(ids, x))

    def learn(self, sampled: Sequence[SampledStep]) -> None:
        """Take tokens that another rank has sampled, before the plan that needs them. With one stage, every rank
        samples all tokens itself."""

    def stages(self) -> list[StageStats]:
        """Return the times of each pipeline stage, on rank 0; nothing without stages."""
        return []

    def close(self) -> None:
        """Release connections of the runner. The group of ranks is closed by its owner."""
        self.experts.close()

    def collect(self, launched: LaunchedStep) -> StepResult:
        """Wait for a launched step and return its result."""
        launched.event.wait()
        inputs, (draft_s, drafts_first) = launched.inputs, self.drafting.take_seconds(launched.proposals)
        count, sampled, drafts = len(inputs.plan.slots), launched.tokens.tolist(), inputs.plan.drafts
        each_one = len(sampled) == count and not drafts  # as in most steps
        result = StepResult(
            step=inputs.plan.step,
            tokens=[[token] for token in sampled] if each_one else [[] for _ in range(count)],
            logprobs=[None] * count,
            prompt_logprobs=[None] * count,
            pooled={},
            drafts=launched.proposals.proposed(inputs),
            draft_s=draft_s,
            drafts_first=drafts_first,
        )
        if drafts:
            for i, tokens in launched.proposals.accepted(inputs, sampled).items():
                result.tokens[i] = tokens
        elif not each_one:
            for i, token in zip(inputs.entries, sampled, strict=True):
                result.tokens[i] = [token]
        if launched.logprobs is not None:
            entries, counts, table = launched.logprobs
            for i, logprob in zip(entries, table.rows(counts), strict=True):
                result.logprobs[i] = [*(result.logprobs[i] or ()), logprob][: len(result.tokens[i])]
        for rows, tables in launched.prompt_logprobs:
            result.prompt_logprobs[rows.entry] = [
                value for table in tables for value in table.rows([rows.count] * len(table.tokens))
            ]
        for pooled in launched.pooled:
            result.pooled.update(self._pooler.finish(pooled))
        return result

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
