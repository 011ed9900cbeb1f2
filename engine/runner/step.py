"""A step on a rank: its inputs, what the model is about to compute, what has been launched, and what is kept from step
to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from engine.devices.device import DeviceEvent, StagedCopy
from engine.model.batch import Batch
from engine.runner.sampler import LogprobTable, SamplingInputs
from engine.wire.plan import SampledStep, StepPlan

EditLogits = Callable[[Tensor], None]
"""Changes logits [sampled tokens, vocab] float32 in place, without waiting for the device."""


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


class PreparedStep:
    """What a LayerRunner needs of a step besides its batch."""

    needs_batch = True  #: whether it computes the step from its batch
    all_chunks = False  #: whether the rows of the batch are divided by `split_rows` with this argument


FROM_BATCH = PreparedStep()


@dataclass(frozen=True, slots=True)
class StepInputs:
    """All inputs of a step. Its tensors are valid only once `staged` has been sent."""

    plan: StepPlan
    staged: StagedCopy
    batch: Batch | None
    """None if nothing needs it. Has no block tables if the device keeps them, until LayerRunner.begin."""
    prepared: PreparedStep
    token_index: Tensor
    """[tokens] int64, indices of the input tokens in the flattened history. The history is read only when the step
    runs, because the step before may still have to sample some of them."""
    first_sequences: Tensor | None
    """[entries of the plan] int64, each entry's first sequence in the batch; None if each is one sequence."""
    added: list[NewTokens]
    entries: list[int]  #: the plan's entry of each sampled token; one with drafts is repeated for each of its tokens
    sampled_rows: Tensor  #: [sampled tokens] int64, their rows of hidden states
    written: Tensor  #: [sampled tokens] int64, where they go in the flattened history
    edits: list[EditLogits]  #: what parts change in the logits before sampling, in this order
    sampling: SamplingInputs
    prompt_logprob_rows: list[PromptLogprobRows]
    sampled: Sequence[SampledStep]
    """Tokens of earlier steps that another rank has sampled."""
    of: dict[str, Any]
    """What parts need of the step, by their names (RankPart.prepare)."""


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


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory that steps read and write. Its contents change between steps; its addresses do not."""

    kv_caches: list[Tensor]  #: one per KV cache group
    kv_scales: list[Tensor | None]  #: one per KV cache group; None without FP8
    history: Tensor  #: [slots, max_model_len] int32, the tokens of each sequence
    of: dict[str, Any] = field(default_factory=dict)
    """What parts keep, by their names."""
    more_blocks: list[Tensor] = field(default_factory=list)
    """Of what parts keep, that which other engines and tiers read block by block."""
    more_block_bytes: list[int] = field(default_factory=list)
    """Bytes of one of each of `more_blocks` on a rank of each stage, all stages together."""

    @property
    def blocks(self) -> list[Tensor]:
        """The tensors whose blocks other engines and tiers read."""
        return [*self.kv_caches, *self.more_blocks]
