"""A step on a rank: its inputs, what the model is about to compute, and what has been launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from engine.devices.device import DeviceEvent, StagedCopy
from engine.model.batch import Batch, split_rows
from engine.runner.cuda_graphs import StepShape, UnpaddedStep
from engine.runner.sampler import LogprobTable, SamplingInputs
from engine.wire.plan import SampledStep, StepPlan


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The tokens of a sequence that is new in this step."""

    slot: int
    tokens: Tensor  #: [n] int32


@dataclass(frozen=True, slots=True)
class PromptLogprobRows:
    """Rows of hidden states from which the log-probabilities of one sequence's prompt tokens are computed."""

    entry: int  #: index in the plan
    first_row: int
    targets: Tensor  #: [rows] int64, the token that follows each row, as an index into the flattened history
    count: int  #: alternatives to report


@dataclass(frozen=True, slots=True)
class BlockTableRows:
    """The rows that a batch takes from the device's block tables [groups, slots, blocks] int32, and the changes to
    apply to the tables first."""

    rows: Tensor  #: [seqs] int64
    width: int  #: entries of each row that the batch needs
    index: Tensor  #: [n] int64, changed entries of the flattened tables of all groups
    blocks: Tensor  #: [n] int32, their new values

    def apply(self, tables: Tensor) -> None:
        """Apply the changes."""
        if len(self.index):
            tables.view(-1)[self.index] = self.blocks

    def give(self, tables: Tensor, batch: Batch) -> None:
        """Give the batch its rows."""
        batch.set_block_tables(tables[:, :, : self.width].index_select(1, self.rows).unbind())


class NoTableRows:
    """Stand-in for BlockTableRows on a CPU, where a batch has its block tables from the start."""

    def apply(self, tables: Tensor) -> None:
        pass

    def give(self, tables: Tensor, batch: Batch) -> None:
        pass


NO_TABLE_ROWS = NoTableRows()


@dataclass(frozen=True, slots=True)
class StepInputs:
    """All inputs of a step. Its tensors are valid only once `staged` has been sent."""

    plan: StepPlan
    staged: StagedCopy
    batch: Batch | None
    """None if only a graph computes the step. Has no block tables if the device keeps them: `block_tables` then selects
    their rows."""
    graph: tuple[StepShape, Tensor] | None
    """The graph's shape and its inputs from `cuda_graphs.pad_step`; None for a step without a graph."""
    unpadded: UnpaddedStep | None
    """What a graph of any shape needs; None if no graph can compute this step."""
    block_tables: BlockTableRows | NoTableRows
    token_index: Tensor
    """[tokens] int64, indices of the input tokens in the flattened history. The history is read only when the step
    runs, because the step before may still have to sample some of them."""
    first_sequences: Tensor | None
    """[entries of the plan] int64, each entry's first sequence in the batch; None if each is one sequence."""
    added: list[NewTokens]
    entries: list[int]  #: the plan's entry of each sampled token; one with drafts is repeated for each of its tokens
    sampled_rows: Tensor  #: [sampled tokens] int64, their rows of hidden states
    written: Tensor  #: [sampled tokens] int64, where they go in the flattened history
    sampling: SamplingInputs
    prompt_logprob_rows: list[PromptLogprobRows]
    sampled: Sequence[SampledStep]
    """Tokens of earlier steps that another rank has sampled."""
    of: dict[str, Any]
    """What parts need of the step, by their names (RankPart.prepare)."""

    def as_graph(self, shape: StepShape) -> StepInputs:
        """Return the inputs of the same step for a graph of this shape. Call it before `staged` is sent."""
        assert self.unpadded is not None, "no graph can compute this step"
        rows = split_rows(self.unpadded.counts, self.unpadded.kv_len, all_chunks=shape.verified > 0)
        return replace(self, graph=(shape, self.staged.add(self.unpadded.pad(shape, *rows))))


@dataclass(slots=True)
class Forward:
    """What the model is about to compute. Parts may change it before."""

    inputs: StepInputs
    batch: Batch | None  #: as in `inputs`, with block tables
    embeddings: tuple[Tensor, Tensor] | None = None
    """Rows of the step, [n] int64, and [n, hidden], what takes the place of the embeddings of their tokens."""
    hidden: Tensor | None = None
    """[tokens, hidden], the output of the layers of another rank, with which this rank goes on."""
    aux: Tensor | None = None
    """[tokens, columns], inputs of `aux_layers` on other ranks, which come before those of this rank."""


@dataclass(slots=True)
class LaunchedStep:
    """A step in the device's queue. Its results are in host memory once `event` has happened."""

    inputs: StepInputs
    tokens: Tensor  #: [n] int64, the sampled tokens, in the order of `inputs.entries`
    logprobs: tuple[list[int], list[int], LogprobTable] | None = None
    """Entries, number of alternatives of each, their table."""
    prompt_logprobs: list[tuple[PromptLogprobRows, list[LogprobTable]]] = field(default_factory=list)
    """One table per PROMPT_LOGPROB_ROWS rows."""
    of: dict[str, Any] = field(default_factory=dict)
    """What parts have launched, by their names."""
    early_event: DeviceEvent | None = None
    """An event that a part has made because the host need not wait for what it launches behind it."""
    event: DeviceEvent = field(init=False)
    """That one, else one behind all that was launched."""


@dataclass(frozen=True, slots=True)
class DummyStep:
    """The largest step, which is computed only to measure its memory. All KV goes to one block of each group."""

    batch: Batch
    counts: list[int]  #: tokens of each sequence
    out: Tensor  #: [tokens, columns], the model's output
