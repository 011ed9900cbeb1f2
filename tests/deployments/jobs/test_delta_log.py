"""What is stored of a job's answer."""

from __future__ import annotations

from deployments.jobs.delta_log import DeltaLog
from engine.wire.parts.cache_writes import HoldOutcome
from engine.wire.parts.costs import SequenceCost
from engine.wire.parts.handoffs import HandoffTimes
from engine.wire.parts.speculation import Verified
from engine.wire.token_delta import TokenDelta


def test_an_answer_is_stored_with_what_parts_told_of_all_of_it_and_not_of_each_step():
    log, hold = DeltaLog(), HoldOutcome(tokens=16, ttl_s=60.0)
    for i in range(100):
        told = [Verified(3, 1), SequenceCost(float(i), 0.0, 0.0), *([] if i else [hold, HandoffTimes(0.1, 0.2)])]
        log.add((0, TokenDelta(request_id="a", position=4 * i, token_ids=[5] * 4).telling(*told)))
    (stored,) = log.outputs()
    assert len(stored.token_ids) == 400 and len(stored.parts) == 3
    assert stored.records(Verified) == [Verified(300, 100)]
    assert stored.records(SequenceCost) == [SequenceCost(99.0, 0.0, 0.0)]
    assert stored.records(HoldOutcome) == [hold]
