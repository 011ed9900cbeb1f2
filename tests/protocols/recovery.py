"""Handoffs bear a loss: from any state in which all has gone well but for lost messages, they are received if nothing
more is lost."""

from __future__ import annotations

from collections import deque

from engine.kv_transfer.protocol.decode_side import DecodeHandoff, DecodeHandoffState
from engine.wire.handoff import Closed, Received
from engine.wire.remote_request import NOBODY
from tests.protocols.process import LOST, Payload, Process

STEP_S, FOR_S = 0.25, 10.0
GOES_WELL = (DecodeHandoffState.WAITING, DecodeHandoffState.READING, DecodeHandoffState.RELEASING)


def check_recovery(processes: list[Process]) -> None:
    """processes: engines whose messages on the way are all lost."""
    if not all(process.is_patient for process in processes):
        return
    if any(answer.error for process in processes for answer in process.engine.answers):
        return  # a read has failed, which is no loss
    expected = [
        (process, handoff.remote_request.handoff_id)
        for process in processes
        for handoff in process.engine.protocol.decode_handoffs.values()
        if handoff.state in GOES_WELL and _is_served(process, handoff, processes)
    ]
    if not expected:
        return
    by_name = {process.name: process for process in processes}
    sent: deque[tuple[str, Payload]] = deque()

    def do(process: Process, *done: object) -> None:
        process.do(*done)  # type: ignore[arg-type]
        sent.extend(process.sent)

    for _ in range(int(FOR_S / STEP_S)):
        for process in processes:
            if process.pass_time(STEP_S):
                do(process, "tick")
        busy = True
        while busy:
            busy = bool(sent)
            while sent:
                name, payload = sent.popleft()
                do(by_name[name], "deliver", payload)
            for process in processes:
                for wanted in process.reads()[:1]:
                    do(process, "read", 0, None if wanted is None else _content(processes, *wanted))
                    busy = True
                for done in [each for each in process.inputs() if each[0] in ("answer", "hear", "compute")][:1]:
                    do(process, *done)
                    busy = True
    for process, handoff_id in expected:
        result = process.engine.results.get(handoff_id)
        assert isinstance(result, Received), f"a handoff does not bear lost messages: {result}"


def _is_served(process: Process, handoff: DecodeHandoff, processes: list[Process]) -> bool:
    """Whether another engine still holds the KV for it, or computes it, and it can be bound to no other; or whether the
    other engine has confirmed that it held the KV."""
    handoff_id, bad_links = handoff.remote_request.handoff_id, process.engine.protocol.quarantined()
    rivals = sum(handoff_id in each.engine.protocol.decode_handoffs for each in processes)
    others = [(each, each.engine.protocol.prefill_handoffs.get(handoff_id)) for each in processes]
    held = {each.engine.peer: leased for each, leased in others if leased is not None}
    if any(leased.state == "refused" for leased in held.values()) or bad_links:
        return False
    if handoff.source is not None:
        if handoff.source in held:
            return held[handoff.source].lease == handoff.lease
        ended = [each.engine.results.get(handoff_id) for each in processes if each.engine.peer == handoff.source]
        return handoff.state is DecodeHandoffState.RELEASING and any(
            isinstance(result, Closed) and result.reason == "released" for result in ended
        )
    mine = (process.engine.peer, *([NOBODY] if rivals == 1 else []))
    return any(leased.decode in mine for leased in held.values())


def _content(processes: list[Process], epoch: int, block: int) -> object:
    source = processes[epoch // 10]
    return source.memory().get(block) if source.engine.peer.epoch == epoch else LOST
