"""What an engine without handoffs has in place of a HandoffChannel."""

from __future__ import annotations

from collections.abc import Sequence

from engine.distributed.refusals import Counts
from engine.wire.handoff import HandoffAction, HandoffEvent
from engine.wire.remote_request import Peer
from engine.wire.stats.handoff_stats import HandoffInfo, HandoffStats


class NoChannel:
    """Stand-in for HandoffChannel in an engine without handoffs."""

    peer: Peer | None = None

    def submit(self, *actions: HandoffAction) -> None:
        raise AssertionError(f"there is no other engine: {actions}")

    def events(self) -> Sequence[HandoffEvent]:
        return ()

    def quarantined(self) -> Sequence[str]:
        return ()

    def snapshot(self) -> Sequence[HandoffInfo]:
        return ()

    def stats(self) -> HandoffStats | None:
        return None

    def refused_by_ranks(self) -> Counts:
        return {}

    def close(self) -> None:
        pass
