"""Runs a drafter with weights at the end of each step.

On a GPU its proposals stay there. The host has the step's tokens before the drafter has ended, and plans the next step
with drafts that only the device knows (`ON_DEVICE`), so the GPU does not wait for the host unless the host takes longer
than the drafter. How many drafts were accepted is known by then: positions and blocks are those of any other plan.

The plain way is that a step ends when its proposals are on the host. It serves CPUs; several ranks or stages, which get
drafts with the next plan; and steps with a grammar, whose masks depend on the drafts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from engine.device import Device, DeviceEvent, copy_to
from engine.runner.cuda_graphs import CudaGraphs, NoGraphs
from engine.runner.inputs import DraftedTokens, StepInputs
from engine.runner.rank_setup import RankSetup
from engine.spec_decode.drafter import DraftInputs, ModelDrafter
from engine.spec_decode.verification import accepted_tokens, last_rows
from engine.wire.plan import ON_DEVICE


@dataclass(frozen=True, slots=True)
class Proposals:
    """What follows the tokens that a step has sampled. Its tensors are on the host once `event` has happened."""

    event: DeviceEvent  #: after it the step can be collected
    verified: Tensor | None = None  #: [n] int32, the drafts that the step has verified; None if its plan has them
    drafts: Tensor | None = None  #: [entries that sample, plan.num_drafts] int64; None if none come to the host
    seconds: Callable[[], float] = float  #: returns the seconds that the drafter took
    stays: bool = False  #: whether the drafter runs on after `event`, and its drafts stay on the device

    def accepted(self, inputs: StepInputs, sampled: list[int]) -> dict[int, list[int]]:
        """Return the accepted tokens of each entry that samples. sampled: tokens in the order of `inputs.entries`."""
        planned, tokens = inputs.plan.drafts, iter(sampled)
        known = itertools.chain.from_iterable(planned.values()) if self.verified is None else self.verified.tolist()
        drafts = iter(known)
        counts = ((entry, len(planned.get(entry, ()))) for entry in dict.fromkeys(inputs.entries))
        return {
            entry: accepted_tokens(list(islice(tokens, count + 1)), list(islice(drafts, count)))
            for entry, count in counts
        }

    def proposed(self, inputs: StepInputs) -> dict[int, list[int]]:
        """Return the tokens that are proposed after each entry that samples, as in StepResult."""
        entries = dict.fromkeys(inputs.entries)
        if self.drafts is not None:
            return dict(zip(entries, self.drafts.tolist(), strict=True))
        return {entry: [ON_DEVICE] * inputs.plan.num_drafts for entry in entries} if self.stays else {}


class NoDrafting:
    """Stand-in for Drafting on a rank without a drafter with weights."""

    drafter: ModelDrafter | None = None
    block_bytes = 0

    def __init__(self, device: Device):
        self._device = device

    def allocate(self, num_blocks: int) -> None:
        pass

    def capture(self, graphs: CudaGraphs | NoGraphs, max_blocks: int) -> None:
        pass

    def hidden(self, out: Tensor) -> Tensor:
        return out

    def fill(self, drafted: DraftedTokens) -> None:
        pass

    def propose(self, inputs: StepInputs, tokens: Tensor, history: Tensor, out: Tensor) -> Proposals:
        return Proposals(self._device.event())

    def take_seconds(self, proposals: Proposals) -> tuple[float, bool]:
        return 0.0, False


class Drafting:
    """A drafter with weights, and what it has proposed for the sequence in each slot."""

    def __init__(self, setup: RankSetup, drafter: ModelDrafter):
        assert setup.config.speculative_config is not None
        self.drafter, self.block_bytes = drafter, drafter.block_bytes
        self._device, self._hidden_size = setup.device, setup.model.hidden_size
        self._num_drafts = setup.config.speculative_config.num_speculative_tokens
        #: Whether every step ends only when its proposals are on the host.
        self.waits = setup.tp.size > 1 or not setup.model.stage.is_whole or not setup.device.asynchronous
        slots = setup.config.max_num_seqs
        self._proposed = torch.zeros(slots, self._num_drafts, dtype=torch.int32, device=setup.torch_device)
        self._graphs: CudaGraphs | None = None
        self._before = Proposals(DeviceEvent())  # of the step that was collected last

    def allocate(self, num_blocks: int) -> None:
        """Allocate the drafter's KV cache."""
        self.drafter.allocate(num_blocks)

    def capture(self, graphs: CudaGraphs | NoGraphs, max_blocks: int) -> None:
        """Capture the passes of the drafter, in the memory that the model's graphs have left. max_blocks: most blocks
        of a sequence."""
        if isinstance(graphs, NoGraphs) or not graphs.captured:
            return
        first = self.drafter.first_pass(max(shape.tokens for shape in graphs.captured))
        budget = graphs.budget_bytes - graphs.used_bytes
        if first is not None and graphs.captured[0].kv_groups == 1:
            self._graphs = graphs.beside(first.forward, first.kv_cache, budget)
            self._graphs.capture(graphs.captured)
            budget -= self._graphs.used_bytes
        if sizes := [shape.seqs for shape in graphs.captured if shape.tokens == shape.seqs]:
            self.drafter.capture(self._device, sizes, max_blocks, self._num_drafts, budget)

    def hidden(self, out: Tensor) -> Tensor:
        """Return the hidden states in the model's output, which also has those of the drafter's `aux_layers`."""
        return out[:, : self._hidden_size]

    def fill(self, drafted: DraftedTokens) -> None:
        """Fill in the drafts of a step that only the device knows."""
        if drafted.kept is not None:
            kept = self._proposed.view(-1)[drafted.kept.source]
            drafted.tokens.index_copy_(0, drafted.kept.index, kept)

    def propose(self, inputs: StepInputs, tokens: Tensor, history: Tensor, out: Tensor) -> Proposals:
        """Let the drafter follow a step whose tokens were sampled, and propose what the plan asks for.

        tokens: [n] int64, in the order of `inputs.entries`. history: [slots, max_model_len] int32 token ids, sampled
        tokens included. out: [tokens, columns], the model's output.
        """
        plan, device, drafted = inputs.plan, self._device, inputs.drafted
        verified = None if drafted is None or drafted.kept is None else device.fetch(drafted.tokens)
        stays, event = not (self.waits or plan.masked), device.event()
        self.drafter.follow(plan)
        if not (plan.num_drafts or self.drafter.reads_all):
            return Proposals(event, verified)
        step = self._inputs(inputs, tokens, history, out)
        drafts, seconds = device.timed(partial(self.drafter.propose, step))
        if not stays:
            fetched = device.fetch(drafts)
            return Proposals(device.event(), verified, fetched, seconds)
        if plan.num_drafts and step.entries:
            slots = copy_to([plan.slots[entry] for entry in step.entries], drafts.device)
            self._proposed[slots, : plan.num_drafts] = drafts.clamp(min=0).int()  # -1 is no token that can be computed
        return Proposals(event, verified, None, seconds, stays=True)

    def take_seconds(self, proposals: Proposals) -> tuple[float, bool]:
        """Return `draft_s` and `drafts_first` of a step's result. Called once for each step, in order, when its event
        has happened."""
        before, self._before = self._before, proposals
        own = 0.0 if proposals.stays else proposals.seconds()
        return own + (before.seconds() if before.stays else 0.0), before.stays

    def _inputs(self, inputs: StepInputs, tokens: Tensor, history: Tensor, out: Tensor) -> DraftInputs:
        """Return the drafter's inputs for a step. The arguments are those of `propose`."""
        batch = inputs.batch
        assert batch is not None
        flat, index, first, size = history.view(-1), inputs.token_index, inputs.first_sequences, self._hidden_size
        out = out[: len(index)]  # a graph's output has padding rows
        entries, rows = list(dict.fromkeys(inputs.entries)), inputs.sampled_rows
        if inputs.drafted is not None:
            counts = [len(inputs.plan.drafts.get(entry, ())) for entry in entries]
            rows = last_rows(rows, tokens, counts, inputs.drafted.tokens)
        following = (index + 1).clamp(max=len(flat) - 1)
        replay = None
        if self._graphs is not None and inputs.graph is not None and inputs.graph[0] in self._graphs.captured:
            replay = partial(self._graphs.run, *inputs.graph)
        return DraftInputs(
            plan=inputs.plan,
            entries=entries,
            batch=batch,
            tables=batch.block_table if first is None else batch.block_table.index_select(0, first),
            next_ids=flat[following].long(),
            last_rows=rows,
            hidden=out[:, :size],
            aux_hidden=out[:, size:] if out.shape[1] > size else None,
            history=history,
            replay=replay,
        )
