"""Runs step plans on one rank: builds the inputs, computes the model, samples.

On a GPU, only `collect` waits for the device. Inputs are copied to the device once per step; sampled tokens stay there
for the next step, and are also copied to the host. So step n+1 is in the device's queue before step n has ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from importlib import import_module

import torch
from torch import Tensor

from engine.model.loader import count_parameters, load_weights, pack_weights
from engine.model.models.llama import Model
from engine.model.models.registry import add_encoders, build_model
from engine.model.ops import sampling
from engine.model.ops.sampling import mark_non_finite
from engine.runner import kv_cache
from engine.runner.inputs import InputBuilder
from engine.runner.layer_runner import LayerRunner
from engine.runner.rank_part import NO_PARTS, RankParts
from engine.runner.rank_setup import RankSetup
from engine.runner.sampler import LogprobTable, logprob_table
from engine.runner.step import Forward, LaunchedStep, PromptLogprobRows, StepInputs, StepMemory
from engine.wire.plan import SampledStep, StepPlan, StepResult

logger = logging.getLogger(__name__)

NOISE = "..model.noise"  # the module that makes up weights
PROMPT_LOGPROB_ROWS = 256  # rows of [vocab] float32 in memory at a time


class ModelRunner:
    """The model, KV cache and sequence state of one rank.

    `prepare` and `launch` may run in two different threads, each called in the order of the plans: `prepare` owns the
    host's block tables, `launch` the tensors on the device.
    """

    def __init__(
        self,
        setup: RankSetup,
        parts: RankParts = NO_PARTS,
        open_layers: Callable[[RankSetup, Model], LayerRunner] = LayerRunner,
    ):
        """Load the model. open_layers: returns what computes its layers. Every rank has to call this within `starting`
        of their group. Raises StartupError."""
        config, model_config, tp, device = setup.config, setup.model, setup.tp, setup.torch_device
        self.setup, self.parts, self.config, self.model_config, self.tp = setup, parts, config, model_config, tp
        self.device, self.overlap, self.block_size = setup.device, setup.overlap, setup.block_size
        self.dtype, self.kv_dtype, groups = setup.dtype, setup.kv_dtype, model_config.kv_groups
        stage = model_config.stage
        self.samples = stage.is_last  #: whether this rank samples the tokens itself
        #: whether a GPU may have the next step before `collect` of this one
        self.launches_ahead = self.overlap and self.device.asynchronous and stage.is_whole
        self.max_steps = setup.max_steps
        scales = setup.kv_scales
        self.kv_scales = [None if scales is None else scales[list(group.layers)] for group in groups]
        self.model = load_model(setup, parts)
        self.layers = open_layers(setup, self.model)
        for attach in parts.attach:
            attach(self.model)
        free = self.layers.free_memory(parts.dummy_step)
        self.num_blocks, self.max_model_len = kv_cache.plan_blocks(setup, free, parts)
        self.kv_caches = [
            kv_cache.allocate(count, group, self.block_size, dtype=self.kv_dtype, device=device, tp=tp)
            for count, group in zip(self.num_blocks, groups, strict=True)
        ]
        self._history = torch.zeros(config.max_num_seqs, self.max_model_len, dtype=torch.int32, device=device)
        self.memory = StepMemory(self.kv_caches, self.kv_scales, self._history)
        for allocate in parts.allocate:
            allocate(self.memory)
        self.sample_rows = sampling.select(device)
        self.layers.open(self.memory)
        self._inputs = InputBuilder(config, model_config, self.device, self.memory, self.layers, parts)
        self.layers.start(self._run)
        for start in parts.start:
            start(self._run, self.layers)
        for cache in self.kv_caches:
            cache[:1] = 0  # clear the block that these steps wrote to

    def _run(self, plan: StepPlan) -> StepResult:
        return self.collect(self.launch(self.prepare(plan)))

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
        self.layers.begin(inputs)
        for change in inputs.plan.blocks:
            for block, start in change.cleared:
                self.kv_caches[change.group][block, :, :, :, start:] = 0
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
        out = self.layers.run(step)
        if step.aux is None:
            return out
        size = self.model_config.hidden_size
        return torch.cat((out[:, :size], step.aux, out[:, size:]), dim=-1)

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
        if not (work.random or work.logprobs or inputs.edits):  # each row takes its most likely token
            return mark_non_finite(*self.model.best(hidden[inputs.sampled_rows])), None
        logits = self.model.logits(hidden[inputs.sampled_rows])
        asked = work.logprobs
        raw = None if asked is None else logits.index_select(0, asked.rows)
        for edit in inputs.edits:
            edit(logits)
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


def load_model(setup: RankSetup, parts: RankParts) -> Model:
    """Return this rank's shard of the model, with its weights. Raises StartupError."""
    started = time.perf_counter()
    config, device = setup.config, setup.torch_device
    model = build_model(setup.model, setup.plan, setup.dtype, device)
    if setup.adapt is not None:
        setup.adapt(model)
    add_encoders(model, setup.dtype, device)
    if config.load_format == "dummy":
        import_module(NOISE, __package__).fill_with_noise(model)
    else:
        load_weights(model, setup.folder, setup.tp)
    parameters = count_parameters(model)
    pack_weights(model)
    for extend in parts.extend:
        extend(model)
    logger.info(
        "model loaded architecture=%s parameters=%.1fM dtype=%s device=%s threads=%d seconds=%.1f",
        setup.model.architecture, parameters / 1e6, str(setup.dtype).removeprefix("torch."),
        device, torch.get_num_threads(), time.perf_counter() - started,
    )  # fmt: skip
    return model
