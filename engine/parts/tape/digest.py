"""Digest of a step's plan: equal plans have equal digests."""

from __future__ import annotations

from engine.wire.part_record import Attached
from engine.wire.plan import BlockChange, StepPlan

NOTHING = 0
"""Digest of a step that computes nothing."""
UNFINISHED = 0xFFFFFFFF
"""Stands for the digest of a plan that was never made, because the scheduler failed."""
WHOLE = 16  # steps; a power of two


def digest(plan: StepPlan | None) -> int:
    """Return 31 bits, by Python's hash of tuples of integers: it takes some nanoseconds per number, and is the same in
    every process with the same version of Python.

    A step that only goes on is told by its number of rows and of changed block tables, and by the last of both. All
    count in steps that start sequences or verify drafts, and in every WHOLE-th step: another choice shows there at the
    latest.
    """
    if plan is None:
        return NOTHING
    starts, blocks = plan.starts, plan.blocks
    if not (plan.added or plan.drafts or not plan.step & WHOLE - 1):
        return digest_of_last(len(starts), starts[-1], plan.counts[-1], blocks)
    rows = tuple(plan.slots), tuple(starts), tuple(plan.counts), tuple(plan.samples), _rare(plan)
    return hash((plan.step, rows, *[(change.slot, *change.blocks) for change in blocks])) & 0x7FFFFFFF or 1


def digest_of_last(num_rows: int, start: int, count: int, blocks: list[BlockChange]) -> int:
    """Return the digest of a step that only goes on. start, count: of its last row."""
    change = (blocks[-1].slot, *blocks[-1].blocks) if blocks else 0
    return hash((num_rows, start, count, len(blocks), change)) & 0x7FFFFFFF or 1


def _rare(plan: StepPlan) -> object:
    added = tuple([(new.slot, len(new.tokens), new.num_prompt, _decided(new.parts)) for new in plan.added])
    drafts = tuple([(entry, len(tokens)) for entry, tokens in plan.drafts.items()])
    return plan.num_drafts, added, drafts, _decided(plan.parts)


def _decided(parts: Attached) -> tuple[int, ...]:
    return tuple(number for name in sorted(parts) for number in parts[name].decided())
