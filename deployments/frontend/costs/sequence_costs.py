"""What a sequence has cost."""

from __future__ import annotations

from deployments.frontend.observers import SequenceObserver, SequenceView
from engine.wire.parts.costs import SequenceCost
from engine.wire.token_delta import TokenDelta


class SequenceCosts(SequenceObserver):
    """Keeps what the attempts of a sequence have cost."""

    def __init__(self, costs: dict[str, SequenceCost], sequence: SequenceView):
        """costs: where they are kept, by the id of the attempt."""
        self._costs = costs

    def arrived(self, delta: TokenDelta) -> None:
        for cost in delta.records(SequenceCost):
            self._costs[delta.request_id] = cost
