"""What a replica says of itself when it is asked."""

from __future__ import annotations

import msgspec

from deployments.routing.stats import RoutingStats
from engine.wire.messages import EngineStatus


class ReplicaStatus(EngineStatus, frozen=True, kw_only=True, tag=EngineStatus.__struct_config__.tag):
    """Its engine's newest status, and what the engine knows nothing of.

    prefill_routing: how its prefill requests found their engines; None if it sends none.

    The tag is that of an EngineStatus, so that each of the two can be read as the other.
    """

    prefill_routing: RoutingStats | None = None

    @classmethod
    def of(cls, status: EngineStatus, prefill_routing: RoutingStats | None) -> ReplicaStatus:
        return cls(**msgspec.structs.asdict(status), prefill_routing=prefill_routing)
