"""Digest of a step's plan: equal plans have equal digests."""

from __future__ import annotations

from engine.wire.plan import StepPlan

NOTHING = 0
"""Digest of a step that computes nothing."""
UNFINISHED = 0xFFFFFFFF
"""Stands for the digest of a plan that was never made, because the scheduler failed."""
WHOLE = 16  # steps; a power of two


def digest(plan: StepPlan | None) -> int:
    """Return 31 bits, by Python's hash of tuples of integers: it takes some nanoseconds per number, and is the same in
    every process with the same version of Python.

    A step that only goes on is told by its number of rows, its first and last row, and what changes. All rows count in
    steps that start sequences or verify drafts, and in every WHOLE-th step: another choice shows there at the latest.
    """
    if plan is None:
        return NOTHING
    starts, counts, blocks = plan.starts, plan.counts, plan.blocks
    rows: object = starts[0], starts[-1], counts[0], counts[-1]
    if plan.added or plan.drafts or not plan.step & WHOLE - 1:
        rows = tuple(plan.slots), tuple(starts), tuple(counts), tuple(plan.samples), _rare(plan)
    changes = tuple([(change.slot, *change.blocks) for change in blocks]) if blocks else ()
    return hash((plan.step, len(starts), rows, changes)) & 0x7FFFFFFF or 1


def _rare(plan: StepPlan) -> object:
    added = tuple([(new.slot, len(new.tokens), new.num_prompt, new.adapter) for new in plan.added])
    drafts = tuple([(entry, len(tokens)) for entry, tokens in plan.drafts.items()])
    return plan.num_drafts, added, drafts, tuple(map(tuple, plan.restored)), tuple(map(tuple, plan.saved))
