"""Interfaces of the two kinds of drafters. A draft is accepted only if it equals the token sampled at its position, and
that token is a function of (seed, position). So no drafter can change a text; a bad one only wastes time.

Speculative decoding: arXiv:2211.17192 (which has a rejection rule instead of this comparison).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # the scheduler imports this file, and does without torch
    from torch import Tensor

    from engine.devices.device import Device
    from engine.model.batch import Batch
    from engine.wire.plan import StepPlan


class SequenceDrafter(Protocol):
    """Guesses how one sequence continues."""

    def propose(self, limit: int) -> Sequence[int]:
        """Return up to `limit` token ids: a guess at how the sequence continues from its newest token."""


class HostDrafter(Protocol):
    """Guesses from token ids alone, in the scheduler: pure Python, a few microseconds per proposal."""

    def follow(self, tokens: list[int], cache_salt: str) -> SequenceDrafter:
        """Begin to draft for a sequence. tokens: list that is read at each proposal, and only grows. cache_salt: only
        sequences with the same salt influence the drafts."""

    def finish(self, tokens: list[int], num_prompt: int, cache_salt: str) -> None:
        """Learn from a sequence that has ended. tokens: prompt, then output."""


@dataclass(slots=True)
class DraftInputs:
    """Tensors of a step of the target model after its tokens were sampled, on the device.

    Rows are those of `batch`: all tokens that the step computed, sequence after sequence. An entry that verified drafts
    computed its last known token and the drafts. Its rows after `last_rows` belong to rejected tokens. The KV cells of
    these rows also hold rejected tokens, until the sequence overwrites them.
    """

    plan: StepPlan
    """The step's plan: `added` has the sequences that entered a slot, `num_drafts` the tokens to propose per entry."""
    entries: list[int]
    """Indices of the n plan entries that sampled."""
    batch: Batch
    """The target's inputs. A drafter's own KV has the same block ids, so it can use `slot_mapping` and `block_table`;
    `kv_cache` is the target's. On a CPU each token of an entry that verified drafts is a separate sequence here."""
    tables: Tensor
    """[entries of the plan, max_blocks] int32, block tables of the entries."""
    next_ids: Tensor
    """[rows] int64, the token after each computed one, known or sampled in this step. Meaningless after
    `last_rows`."""
    last_rows: Tensor
    """[n] int64, for each entry the row after which the newest token follows."""
    hidden: Tensor
    """[rows, hidden], the model's last hidden states, from which logits are computed."""
    aux_hidden: Tensor | None
    """[rows, layers * hidden], the inputs of the target's layers that the drafter lists in `aux_layers`."""
    history: Tensor
    """[slots, max_model_len] int32, the tokens of each sequence by slot."""
    replay: Callable[[], Tensor] | None = None
    """Computes the drafter's `first_pass` as a graph, with some rows of padding; None if no graph has room."""


@dataclass(frozen=True, slots=True)
class FirstPass:
    """A pass that reads its inputs from memory that never moves, so that a graph can hold it."""

    forward: Callable[[Tensor, Batch], Tensor]
    """Takes the target's token ids, which it ignores, and its batch with `kv_cache` in place of the target's. Returns
    [rows, columns], which `propose` expects of `DraftInputs.replay`."""
    kv_cache: Tensor


class ModelDrafter:
    """A drafter with weights. It runs on rank 0 with the target; the other ranks get its drafts with the next plan. The
    defaults are those of a drafter that keeps no KV, and whose proposals are one pass."""

    aux_layers: tuple[int, ...] = ()
    """Layers of the target whose inputs it needs (DraftInputs.aux_hidden)."""
    block_bytes: int = 0
    """Device memory that it needs per KV block of the target; the size of the KV cache accounts for it."""

    reads_all: bool = False
    """Whether it computes something for every token of the target, and so runs even after steps without proposals."""

    def allocate(self, num_blocks: int) -> None:
        """Allocate the drafter's KV cache, with as many blocks as the target's cache."""

    def first_pass(self, max_tokens: int) -> FirstPass | None:
        """Return the first pass of a proposal, over up to `max_tokens` rows, if its batch is that of the target's step;
        else None."""
        return None

    def capture(self, device: Device, sizes: Sequence[int], max_blocks: int, num_drafts: int, budget: int) -> None:
        """Capture the passes of a proposal after the first as graphs, for these numbers of sequences. max_blocks: most
        blocks of a sequence. num_drafts: most tokens of a proposal. budget: bytes for all graphs."""

    def follow(self, plan: StepPlan) -> None:
        """Record a step of the target. Called for every step, in order."""

    def propose(self, step: DraftInputs) -> Tensor:
        """Return [n, plan.num_drafts] int64: guesses of the tokens after each entry's newest token."""
        raise NotImplementedError
