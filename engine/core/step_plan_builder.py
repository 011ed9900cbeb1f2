"""Collects what one step computes."""

from __future__ import annotations

from engine.core.request import Request
from engine.wire.part_record import Attached, PartRecord
from engine.wire.plan import BlockChange, NewSequence, StepPlan


class StepPlanBuilder:
    """Builds the StepPlan of one step while the scheduler decides."""

    def __init__(self) -> None:
        #: The request of each entry of the plan.
        self.requests: list[Request] = []
        self._added: list[NewSequence] = []
        self._starts: list[int] = []
        self._counts: list[int] = []
        self._samples: list[bool] = []
        self._drafts: dict[int, list[int]] = {}
        #: What parts add, as in StepPlan.
        self.num_drafts = 0
        self.parts: Attached = {}

    def add_sequence(self, request: Request) -> None:
        """Add a request that just got a slot to the runner's sequences."""
        self._added.append(
            NewSequence(
                slot=request.slot,
                tokens=list(request.tokens),
                num_prompt=request.num_prompt,
                params=request.params,
                seed=request.seed,
                parts=dict(request.attached),
            )
        )

    def attach(self, record: PartRecord) -> None:
        """Tell a part's ends on the ranks what the step means for it."""
        self.parts[record.part] = record

    def compute(self, request: Request, count: int, drafts: list[int] | None = None) -> None:
        """Compute the next `count` tokens of a request, and sample a new token if they include its last one. The tokens
        count as `computed` from now on, and the sampled one as `in_flight`.

        drafts: guesses of the tokens after the last; they too count as `computed` until the step is committed.
        """
        start = request.computed
        samples = start + count == len(request.tokens) + request.in_flight
        if drafts:
            self._drafts[len(self.requests)] = drafts
            count += len(drafts)
        self.requests.append(request)
        self._starts.append(start)
        self._counts.append(count)
        self._samples.append(samples)
        request.computed = start + count
        request.in_flight += samples

    def plan(self, step: int, blocks: list[BlockChange]) -> StepPlan:
        masks = {
            i: request.constraint.masks(len(self._drafts.get(i, ())))
            for i, request in enumerate(self.requests)
            if request.constraint is not None and self._samples[i]
        }
        return StepPlan(
            step=step,
            added=self._added,
            blocks=blocks,
            slots=[request.slot for request in self.requests],
            starts=self._starts,
            counts=self._counts,
            samples=self._samples,
            masked=list(masks),
            masks=b"".join(masks.values()),
            drafts=self._drafts,
            num_drafts=self.num_drafts,
            parts=self.parts,
        )
