"""The two kinds of drafters. A draft is accepted exactly where it equals the token that is sampled at its position, and
that token is a function of (seed, position); so no drafter can change a text, and a bad one only wastes time.

Speculative decoding: arXiv:2211.17192 (with a rejection rule instead of this comparison).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # the scheduler imports this file, and does without torch
    from torch import Tensor

    from engine.model.batch import Batch
    from engine.wire.plan import StepPlan


class SequenceDrafter(Protocol):
    """Guesses how one sequence continues."""

    def propose(self, limit: int) -> Sequence[int]:
        """Return up to `limit` token ids that may follow the sequence as it is now."""


class HostDrafter(Protocol):
    """Guesses from token ids alone, in the scheduler: pure Python, a few microseconds per proposal."""

    def follow(self, tokens: list[int], cache_salt: str) -> SequenceDrafter:
        """Begin a sequence. tokens: read at each proposal; until then they only ever grow. cache_salt: what was learnt
        from sequences of another one is of no influence."""

    def finish(self, tokens: list[int], num_prompt: int, cache_salt: str) -> None:
        """Learn from a sequence that has ended: prompt, then output."""


@dataclass(slots=True)
class DraftInputs:
    """A step of the target model after its tokens were sampled, on the device.

    Rows are those of `batch`: all tokens that the step computed, sequence after sequence. An entry that verified drafts
    computed its last known token and the drafts; its rows after `last_rows` hold rejected tokens. So do its KV cells,
    until the sequence overwrites them.
    """

    plan: StepPlan
    """`added` names the sequences that entered a slot, `num_drafts` the tokens to propose per entry."""
    entries: list[int]
    """The n entries of the plan that sampled."""
    batch: Batch
    """The target's inputs. A drafter's own KV has the same block ids, so `slot_mapping` and `block_table` hold for it;
    `kv_cache` is the target's. Each token of an entry that verified drafts is a separate sequence here."""
    tables: Tensor
    """[entries of the plan, max_blocks] int32, their block tables."""
    next_ids: Tensor
    """[rows] int64, the token after each that the step computed: known, or sampled in this step. Of no meaning
    after `last_rows`."""
    last_rows: Tensor
    """[n] int64, of each entry the row whose next token is the newest one."""
    hidden: Tensor
    """[rows, hidden], the model's last hidden states, from which logits are made."""
    aux_hidden: Tensor | None
    """[rows, layers * hidden], the inputs of the layers that the drafter names in `aux_layers`."""
    history: Tensor
    """[slots, max_model_len] int32, the tokens of each sequence by slot."""


class ModelDrafter(Protocol):
    """Guesses with weights, on rank 0 with the target; the other ranks get its drafts with the next plan."""

    aux_layers: tuple[int, ...]
    """Layers of the target whose inputs it wants to see."""
    block_bytes: int
    """Device memory that it needs for each KV block of the target; counted in the size of the cache."""

    reads_all: bool
    """It computes something for every token of the target, so it is asked after steps too that propose nothing."""

    def allocate(self, num_blocks: int) -> None:
        """Make its KV cache, for as many blocks as the target's."""

    def follow(self, plan: StepPlan) -> None:
        """Take note of a step of the target, of each in order."""

    def propose(self, step: DraftInputs) -> Tensor:
        """Return [n, plan.num_drafts] int64, the tokens that may follow the newest one of each entry."""
