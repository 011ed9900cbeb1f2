"""Drafts on a rank: steps verify them, and at the end of each step a drafter with weights runs.

On a GPU its proposals stay there. The host has the step's tokens before the drafter has ended, and plans the next step
with drafts that only the device knows (`ON_DEVICE`), so the GPU does not wait for the host unless the host takes longer
than the drafter. How many drafts were accepted is known by then: positions and blocks are those of any other plan.

The plain way is that a step ends when its proposals are on the host. It serves CPUs; several ranks or stages, which get
drafts with the next plan; and steps with a grammar, whose masks depend on the drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from engine.config import EngineConfig
from engine.devices.device import StagedCopy, copy_to
from engine.model.models.llama import Model
from engine.runner.graphs.cuda_graphs import CudaGraphs
from engine.runner.graphs.gpu_layers import GPULayers, GPUStep
from engine.runner.graphs.warm_up import SAMPLINGS, plan
from engine.runner.layer_runner import LayerRunner, Run
from engine.runner.rank_part import RankPart
from engine.runner.rank_setup import RankSetup
from engine.runner.step import DummyStep, Forward, LaunchedStep, StepInputs, StepMemory
from engine.runner.step_layout import StepLayout
from engine.spec_decode.drafter import DraftInputs, ModelDrafter
from engine.spec_decode.open_drafter import open_drafter, target_layers
from engine.spec_decode.target import Target
from engine.spec_decode.verification import accepted_tokens, last_rows
from engine.wire.plan import ON_DEVICE, BlockChange, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Proposals:
    """What follows the tokens that a step has sampled. Its tensors are on the host once the step's event has
    happened."""

    verified: Tensor | None = None  #: [n] int32, the drafts that the step has verified; None if its plan has them
    drafts: Tensor | None = None  #: [entries that sample, plan.num_drafts] int64; None if none come to the host
    seconds: Callable[[], float] = float  #: returns the seconds that the drafter took
    stays: bool = False  #: whether the drafter runs on after the step's event, and its drafts stay on the device

    def proposed(self, inputs: StepInputs) -> dict[int, list[int]]:
        """Return the tokens that are proposed after each entry that samples, as in StepResult."""
        entries = dict.fromkeys(inputs.entries)
        if self.drafts is not None:
            return dict(zip(entries, self.drafts.tolist(), strict=True))
        return {entry: [ON_DEVICE] * inputs.plan.num_drafts for entry in entries} if self.stays else {}


@dataclass(frozen=True, slots=True)
class KeptDrafts:
    """Draft tokens that only the device knows."""

    index: Tensor  #: [n] int64, their places in `DraftedTokens.tokens`
    source: Tensor  #: [n] int64, where they are in the flattened proposals [slots, num_speculative_tokens]


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    """Draft tokens that a step verifies."""

    written: Tensor  #: [n] int64, where they go in the flattened history
    tokens: Tensor  #: [n] int32
    kept: KeptDrafts | None  #: those of `tokens` that are filled in on the device; None if there are none


class Drafting(RankPart):
    """Drafts that steps verify; and on the first rank of the last stage the drafter with weights, if one is configured,
    and what it has proposed for the sequence in each slot. Other ranks get drafts with plans."""

    name = "speculation"

    def __init__(self, setup: RankSetup):
        options = setup.config.of(EngineConfig).speculative_config
        assert options is not None
        self._setup, self._device = setup, setup.device
        self._hidden_size, self._num_drafts = setup.model.hidden_size, options.num_speculative_tokens
        self.drafter: ModelDrafter | None = None
        #: Whether every step ends only when its proposals are on the host.
        self.waits = setup.tp.size > 1 or not setup.model.stage.is_whole or not setup.device.asynchronous
        self._graphs: CudaGraphs | None = None
        self._before = Proposals()  # of the step that was collected last

    # -- the start ---------------------------------------------------------------------------------------------------

    def attach(self, model: Model) -> None:
        """Load the configured drafter with weights, if there is one. Of the inputs of layers that it needs, each stage
        adds those of its own layers to its output."""
        setup, stage = self._setup, self._setup.model.stage
        if not stage.is_whole or setup.tp.rank == 0:
            model.aux_layers = tuple(
                i for i in target_layers(setup.config.of(EngineConfig), setup.model) if i in stage.layers
            )
        if setup.tp.rank != 0 or not stage.is_last:
            return
        target = Target(
            model=model,
            config=setup.model,
            folder=setup.folder,
            tp=setup.tp,
            dtype=setup.dtype,
            device=setup.torch_device,
            block_size=setup.block_size,
            dummy=setup.config.load_format == "dummy",
        )
        if (drafter := open_drafter(setup.config.of(EngineConfig), target)) is None:
            return
        self.drafter, self.needs_batch, self.block_bytes = drafter, True, drafter.block_bytes
        shape = setup.config.max_num_seqs, self._num_drafts
        self._proposed = torch.zeros(shape, dtype=torch.int32, device=setup.torch_device)

    def dummy_step(self, step: DummyStep) -> None:
        if self.drafter is not None:
            run_dummy_drafts(self._setup, self.drafter, self._num_drafts, step)

    def allocate(self, memory: StepMemory) -> None:
        """Allocate the drafter's KV cache."""
        self._history = memory.history
        if self.drafter is not None:
            self.drafter.allocate(len(memory.kv_caches[0]))

    @torch.inference_mode()
    def start(self, run: Run, runner: LayerRunner) -> None:
        """Capture the passes of the drafter, in the memory that the model's graphs have left."""
        graphs = runner.graphs if isinstance(runner, GPULayers) else None
        if self.drafter is None or not isinstance(graphs, CudaGraphs) or not graphs.captured:
            return
        first = self.drafter.first_pass(max(shape.tokens for shape in graphs.captured))
        budget = graphs.budget_bytes - graphs.used_bytes
        if first is not None and graphs.captured[0].kv_groups == 1:
            self._graphs = graphs.beside(first.forward, first.kv_cache, budget)
            self._graphs.capture(graphs.captured)
            budget -= self._graphs.used_bytes
        if sizes := [shape.seqs for shape in graphs.captured if shape.tokens == shape.seqs]:
            max_blocks = -(-self._history.shape[1] // self._setup.block_size)
            self.drafter.capture(self._device, sizes, max_blocks, self._num_drafts, budget)

    # -- a step ------------------------------------------------------------------------------------------------------

    def prepare(self, plan: StepPlan, layout: StepLayout, staged: StagedCopy) -> DraftedTokens | None:
        if not plan.drafts:
            return None
        ends, max_model_len = layout.sequences.ends, self._history.shape[1]
        ranges = [
            plan.slots[i] * max_model_len + np.arange(ends[i] - len(drafts), ends[i])
            for i, drafts in plan.drafts.items()
        ]
        tokens = np.concatenate([np.array(drafts, dtype=np.int32) for drafts in plan.drafts.values()])
        kept = None if self.drafter is None else self._kept(plan, np.flatnonzero(tokens == ON_DEVICE), staged)
        return DraftedTokens(staged.add(np.concatenate(ranges)), staged.add(tokens), kept)

    def _kept(self, plan: StepPlan, index: np.ndarray, staged: StagedCopy) -> KeptDrafts | None:
        """Find the drafts of a plan that only the device knows. index: [n], their places among all drafts."""
        if not len(index):
            return None
        places = [plan.slots[i] * self._num_drafts + np.arange(len(drafts)) for i, drafts in plan.drafts.items()]
        return KeptDrafts(staged.add(index), staged.add(np.concatenate(places)[index]))

    def before(self, step: Forward) -> None:
        """Write the drafts to the history, after filling in those that only the device knows."""
        drafted: DraftedTokens | None = step.inputs.of.get(self.name)
        if drafted is None:
            return
        if drafted.kept is not None:
            kept = self._proposed.view(-1)[drafted.kept.source]
            drafted.tokens.index_copy_(0, drafted.kept.index, kept)
        self._history.view(-1)[drafted.written] = drafted.tokens

    def after(self, step: LaunchedStep, out: Tensor, tokens: Tensor) -> None:
        if self.drafter is not None:
            step.of[self.name] = self.propose(step, out, tokens)

    def collected(self, step: LaunchedStep, result: StepResult) -> StepResult:
        proposals: Proposals | None = step.of.get(self.name)
        if step.inputs.plan.drafts and self._setup.model.stage.is_last:
            known = None if proposals is None else proposals.verified
            cut_rejected(result, step.inputs.plan.drafts, None if known is None else known.tolist())
        if proposals is None:
            return result
        draft_s, drafts_first = self.take_seconds(proposals)
        proposed = proposals.proposed(step.inputs)
        return structs.replace(result, drafts=proposed, draft_s=draft_s, drafts_first=drafts_first)

    def propose(self, launched: LaunchedStep, out: Tensor, tokens: Tensor) -> Proposals:
        """Let the drafter follow a step whose tokens were sampled, and propose what the plan asks for. The arguments
        are those of `after`."""
        assert self.drafter is not None
        inputs, device = launched.inputs, self._device
        plan, drafted = inputs.plan, inputs.of.get(self.name)
        verified = None if drafted is None or drafted.kept is None else device.fetch(drafted.tokens)
        self.drafter.follow(plan)
        if not (plan.num_drafts or self.drafter.reads_all):
            return Proposals(verified)
        if stays := not (self.waits or plan.masked):
            launched.early_event = device.event()
        step = self._inputs(inputs, tokens, out)
        drafts, seconds = device.timed(partial(self.drafter.propose, step))
        if not stays:
            return Proposals(verified, device.fetch(drafts), seconds)
        if plan.num_drafts and step.entries:
            slots = copy_to([plan.slots[entry] for entry in step.entries], drafts.device)
            self._proposed[slots, : plan.num_drafts] = drafts.clamp(min=0).int()  # -1 is no token that can be computed
        return Proposals(verified, None, seconds, stays=True)

    def take_seconds(self, proposals: Proposals) -> tuple[float, bool]:
        """Return `draft_s` and `drafts_first` of a step's result. Called once for each step, in order, when its event
        has happened."""
        before, self._before = self._before, proposals
        own = 0.0 if proposals.stays else proposals.seconds()
        return own + (before.seconds() if before.stays else 0.0), before.stays

    def _inputs(self, inputs: StepInputs, tokens: Tensor, out: Tensor) -> DraftInputs:
        """Return the drafter's inputs for a step. tokens, out: as for `after`."""
        batch, drafted = inputs.batch, inputs.of.get(self.name)
        assert batch is not None
        flat, index, first, size = self._history.view(-1), inputs.token_index, inputs.first_sequences, self._hidden_size
        entries, rows = list(dict.fromkeys(inputs.entries)), inputs.sampled_rows
        if drafted is not None:
            counts = [len(inputs.plan.drafts.get(entry, ())) for entry in entries]
            rows = last_rows(rows, tokens, counts, drafted.tokens)
        following = (index + 1).clamp(max=len(flat) - 1)
        replay = None
        graph = inputs.prepared.graph if isinstance(inputs.prepared, GPUStep) else None
        if self._graphs is not None and graph is not None and graph[0] in self._graphs.captured:
            replay = partial(self._graphs.run, *graph)
        return DraftInputs(
            plan=inputs.plan,
            entries=entries,
            batch=batch,
            tables=batch.block_table if first is None else batch.block_table.index_select(0, first),
            next_ids=flat[following].long(),
            last_rows=rows,
            hidden=out[:, :size],
            aux_hidden=out[:, size:] if out.shape[1] > size else None,
            history=self._history,
            replay=replay,
        )


def cut_rejected(result: StepResult, drafts: dict[int, list[int]], known: list[int] | None) -> None:
    """Cut off what was sampled after rejected drafts. drafts: of the plan. known: the same one after the other, if the
    plan does not know them."""
    first = 0
    for entry, planned in drafts.items():
        tokens, stop = result.tokens[entry], first + len(planned)
        accepted = accepted_tokens(tokens, planned if known is None else known[first:stop])
        first = stop
        del tokens[len(accepted) :]
        if (logprobs := result.logprobs[entry]) is not None:
            del logprobs[len(accepted) :]


def run_dummy_drafts(setup: RankSetup, drafter: ModelDrafter, num_drafts: int, dummy: DummyStep) -> None:
    """Propose for every sequence. All block tables name one KV block in all places."""
    drafter.allocate(1)
    batch, counts, out = dummy.batch, dummy.counts, dummy.out
    table, size = batch.block_table, setup.model.hidden_size
    step_plan = plan(counts, counts, SAMPLINGS[0], num_drafts)
    step_plan.blocks.extend(BlockChange(slot, 0, [0] * table.shape[1]) for slot in step_plan.slots)
    drafter.follow(step_plan)
    step = DraftInputs(
        plan=step_plan,
        entries=step_plan.slots,
        batch=batch,
        tables=table,
        next_ids=torch.zeros_like(batch.positions),
        last_rows=batch.query_start[1:].long() - 1,
        hidden=out[:, :size],
        aux_hidden=out[:, size:] if out.shape[1] > size else None,
        history=torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32, device=out.device),
    )
    drafter.propose(step)
