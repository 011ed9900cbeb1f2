"""Decode's side of one handoff. Pure: no clock, socket or thread; see protocol.py.

WAITING ──Progress──▶ READING ──all read, first token known──▶ RELEASING ──Released(held)──▶ OVER: Received
   │                     │                                         │
   └────── failure ──────┴──▶ STOPPING, while a read runs ──▶ OVER: Failed
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from engine.kv_transfer.protocol.effects import Effects
from engine.kv_transfer.protocol.messages import (
    Cancel,
    Claim,
    Fetch,
    Heartbeat,
    Progress,
    Read,
    ReadEnded,
    Refused,
    Release,
    Released,
    StopRead,
)
from engine.kv_transfer.protocol.receive_state import ReceiveState
from engine.options.handoff import HandoffConfig
from engine.wire.handoff import Failed, OpenHandoff, Received, Spent
from engine.wire.remote_request import Peer

READ_LIMIT = 12  # times progress_s: a read that takes longer is given up, since the link is too slow to be useful
LOST = ("unknown", "expired")  # reasons of Refused that mean the lease is over

# Reasons why a handoff fails, and whether another prefill engine may succeed.
FAILURES = {
    "cancelled": False,  # its client has left
    "remote_prefill_failed": True,  # the call with the prefill request failed; the caller says whether to retry
    "not_accepted": True,  # no answer within accept_s
    "refused": True,  # prefill cannot or will not compute it
    "quarantined": True,  # the prefill request went to an engine whose link has just failed, or whose KV was wrong
    "silent": True,  # heartbeats or releases stay unanswered for progress_s
    "read": True,  # a rank could not read
    "lost_lease": True,  # prefill no longer holds the blocks
    "prompt_hash": False,  # prefill computed another prompt
    "protocol": False,  # prefill contradicts itself
    "corrupt": True,  # other KV of the same engine was wrong
}
DOUBTFUL = ("lost_lease", "prompt_hash", "protocol", "corrupt")  # failures after which no block read is kept


class DecodeHandoffState(Enum):
    WAITING = "waiting"
    READING = "reading"
    RELEASING = "releasing"
    STOPPING = "stopping"
    OVER = "over"


@dataclass(slots=True)
class RunningRead:
    """A read that some ranks have not finished."""

    read_id: int
    num_blocks: int
    waiting: set[int]  #: ranks that have not finished it
    ticks: int = 0  #: its age in ticks


class DecodeHandoff:
    """A prompt of this engine that a prefill engine computes.

    Waits are counted in ticks of heartbeat_s, not in seconds. A decode engine that was itself paused has received
    nothing during the pause, and must not conclude that others have died.
    """

    def __init__(
        self,
        opened: OpenHandoff,
        *,
        config: HandoffConfig,
        block_size: int,
        num_ranks: int,
        new_read_id: Callable[[], int],
        is_quarantined: Callable[[str], bool],
        out: Effects,
        now: float,
    ):
        self.remote_request = opened.remote_request
        groups = [opened.blocks, *opened.others]
        self.receive_state = ReceiveState(opened.remote_request, groups, block_size, named=bool(opened.names))
        self.state = DecodeHandoffState.WAITING
        self.source: Peer | None = None
        self.opened_at = now
        self.failure: tuple[str, str, bool] | None = None  # reason, detail, retry
        self.num_bytes = 0
        self.reading: RunningRead | None = None
        self.unstoppable = False  # True if a rank does not stop writing
        self.due = now + config.heartbeat_s  # time of the next tick
        self._config, self._out = config, out
        self._num_ranks, self._new_read_id, self._is_quarantined = num_ranks, new_read_id, is_quarantined
        self._missed = 0  # ticks since the last sign of life, or since the state was entered
        self.lease = 0  # lease at the source, once there is one
        self._sent = self._echo = 0  # numbers of the last heartbeat sent, and of the last one echoed
        self._accepted_at = self._first_at = self._released_at = now
        self._claimed, self._names = opened.source, opened.names
        self._spent_ns = self._paid_ns = 0
        self._claim()

    # -- from the step loop --------------------------------------------------------------------------------

    def fail(self, reason: str, now: float, detail: str = "", retry: bool | None = None, paid_ns: int = 0) -> None:
        """Abandon the handoff. `Failed` follows once nothing is being read. Only the first reason counts. paid_ns: as
        in CancelHandoff."""
        if self.state in (DecodeHandoffState.STOPPING, DecodeHandoffState.OVER):
            return
        self._paid_ns = paid_ns
        self.failure = (reason, detail, FAILURES[reason] if retry is None else retry)
        self._note(f"fails: {reason} {detail}".rstrip())
        if self.reading is None:
            self._end(now)
        else:
            self._enter(DecodeHandoffState.STOPPING, now)
            self._out.commands.append(StopRead(self.reading.read_id))

    # -- from prefill --------------------------------------------------------------------------------------

    def on_progress(self, sender: Peer, message: Progress, now: float) -> None:
        if self.source is None:
            self._accepted(sender, message.lease, now)
        if self._echo < message.echo <= self._sent:
            self._echo, self._missed = message.echo, 0
            self.receive_state.echoed(message.echo)
        if self.state is not DecodeHandoffState.READING:
            return
        knew_first = self.receive_state.first is not None
        if problem := self.receive_state.update(message):
            self.fail("protocol", now, problem)
            return
        if message.cost.compute_ns > self._spent_ns:
            self._spent_ns = message.cost.compute_ns
            self._out.events.append(Spent(self.remote_request.handoff_id, message.cost))
        if self.receive_state.first is not None and not knew_first:
            self._first_at = now
            self._out.counters.phase("compute", now - self._accepted_at)
            self._note(f"first token known; {self.receive_state.read} of {len(self.receive_state.local)} blocks read")
        self._advance(now)

    def on_refused(self, sender: Peer, message: Refused, now: float) -> None:
        if self.source is None:
            self.source, self.lease = sender, message.lease  # its Progress may be lost, but it must get a Cancel
        self.fail("lost_lease" if message.reason in LOST else "refused", now, message.reason)

    def on_released(self, message: Released, now: float) -> None:
        if self.state is not DecodeHandoffState.RELEASING:
            return
        if not message.held:
            self.fail("lost_lease", now, "prefill's lease ended before decode released the blocks")
            return
        assert self.receive_state.first is not None
        self.state = DecodeHandoffState.OVER
        self._out.events.append(Received(self.remote_request.handoff_id, self.receive_state.first, message.byte_ns))
        self._out.counters.ended("received", "")
        self._out.counters.phase("release", now - self._released_at)
        self._out.counters.phase("total", now - self.opened_at)
        self._note(f"received, {self.num_bytes} bytes")

    # -- from the KV workers -------------------------------------------------------------------------------

    def on_read_ended(self, message: ReadEnded, now: float) -> None:
        read = self.reading
        if read is None or read.read_id != message.read_id or message.rank not in read.waiting:
            self._out.counters.stale_messages += 1
            return
        read.waiting.remove(message.rank)
        self.num_bytes += message.num_bytes
        if message.num_bytes:
            overlapped = self.receive_state.first is None
            self._out.counters.read(message.transport, message.num_bytes, message.seconds, overlapped)
        if message.error is not None:
            self.fail("read", now, f"rank {message.rank}: {message.error}")
        if read.waiting:
            return
        self.reading = None
        if self.state is DecodeHandoffState.STOPPING:
            self._end(now)
            return
        self.receive_state.ended(next_heartbeat=self._sent + 1)
        self._note(f"{self.receive_state.read} of {len(self.receive_state.local)} blocks read")
        self._advance(now)
        if self.state is DecodeHandoffState.READING:
            self._send_heartbeat()  # at once: its echo validates the blocks just read

    # -- time ----------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Act on elapsed time. Call it at `due` or later."""
        if self.state is DecodeHandoffState.OVER or now < self.due:
            return
        self.due = now + self._config.heartbeat_s
        self._missed += 1
        if self.reading is not None:
            self.reading.ticks += 1
        if self._missed > self._patience():
            self._lose_patience(now)
        elif self.state is DecodeHandoffState.WAITING:
            self._claim()
        elif self.state is DecodeHandoffState.READING:
            if self.reading is not None and self.reading.ticks > READ_LIMIT * self._ticks(self._config.progress_s):
                self.fail("read", now, f"one read of {self.reading.num_blocks} blocks takes too long")
            else:
                self._send_heartbeat()
        elif self.state is DecodeHandoffState.RELEASING:
            self._send(Release(self.remote_request.handoff_id, self.lease))
        elif self.state is DecodeHandoffState.STOPPING:
            assert self.reading is not None
            self._out.commands.append(StopRead(self.reading.read_id))

    def deadline_s(self, now: float) -> float:
        """Return after how many seconds without a message this side gives up."""
        return self.due - now + self._config.heartbeat_s * (self._patience() - self._missed)

    def _patience(self) -> int:
        if self.state is DecodeHandoffState.WAITING:
            return self._ticks(self._config.accept_s)
        if self.state is DecodeHandoffState.STOPPING:
            return 2 * self._ticks(self._config.progress_s)  # a blocked read ends by itself after progress_s
        return self._ticks(self._config.progress_s)

    def _lose_patience(self, now: float) -> None:
        if self.state is DecodeHandoffState.WAITING:
            self.fail("not_accepted", now, f"no engine has answered within {self._config.accept_s:g} s")
        elif self.state is DecodeHandoffState.STOPPING:
            self.unstoppable = True
        else:
            self.fail("silent", now, f"no answer for {self._config.progress_s:g} s")

    def _ticks(self, seconds: float) -> int:
        return math.ceil(seconds / self._config.heartbeat_s)

    # -- parts ---------------------------------------------------------------------------------------------

    def _claim(self) -> None:
        """Ask another engine for the KV of a request that moves here, or for cached blocks."""
        request = self.remote_request
        if self._claimed is None:
            return
        asks: Claim | Fetch = Claim(request.handoff_id, request.skip, request.fingerprint)
        if self._names:
            asks = Fetch(
                request.handoff_id,
                request.request_id,
                request.skip,
                len(request.token_ids),
                request.fingerprint,
                self._names,
                request.timeout_s,
            )
        self._out.messages.append((self._claimed, asks))

    def _accepted(self, sender: Peer, lease: int, now: float) -> None:
        self.source, self.lease = sender, lease
        self._accepted_at = now
        self._out.counters.phase("accept", now - self.opened_at)
        self._note(f"accepted by {sender.engine_id}")
        if self._is_quarantined(sender.engine_id):
            self.fail("quarantined", now, f"nothing is read from {sender.engine_id} for now")
        else:
            self._enter(DecodeHandoffState.READING, now)
            self._send_heartbeat()

    def _advance(self, now: float) -> None:
        """Read the next blocks, or release the lease once all are read."""
        if self.reading is not None or self.state is not DecodeHandoffState.READING:
            return
        blocks = self.receive_state.start()
        if blocks is not None:
            self._read(*blocks)
        elif self.receive_state.complete and not self.receive_state.is_asked_prompt:
            self.fail("prompt_hash", now, "prefill computed a different prompt")
        elif self.receive_state.complete:
            self._out.counters.phase("exposed", now - self._first_at)
            self._released_at = now
            self._enter(DecodeHandoffState.RELEASING, now)
            self._send(Release(self.remote_request.handoff_id, self.lease))

    def _read(self, start: int, stop: int, group: int) -> None:
        assert self.source is not None
        receive_state = self.receive_state
        self.reading = RunningRead(self._new_read_id(), stop - start, set(range(self._num_ranks)))
        self._out.commands.append(
            Read(
                read_id=self.reading.read_id,
                source_epoch=self.source.epoch,
                ranks=receive_state.ranks,
                source_blocks=receive_state.remote[start:stop],
                local_blocks=receive_state.local[start:stop],
                group=group,
            )
        )

    def _end(self, now: float) -> None:
        """End a failed handoff. Call it only when nothing is being read."""
        assert self.failure is not None
        reason, detail, retry = self.failure
        self.state = DecodeHandoffState.OVER
        if self.source is not None:
            self._send(Cancel(self.remote_request.handoff_id, self.lease, self._paid_ns))
        # after a doubtful failure, keep not even validated blocks: something unknown may be wrong
        verified = self.remote_request.skip if reason in DOUBTFUL else self.receive_state.verified
        self._out.events.append(Failed(self.remote_request.handoff_id, reason, verified, retry, detail))
        self._out.counters.ended("failed", reason)
        self._out.counters.phase("total", now - self.opened_at)
        self._note(f"failed: {reason}; the KV of {verified - self.remote_request.skip} tokens that were read is kept")

    def _enter(self, state: DecodeHandoffState, now: float) -> None:
        self.state, self._missed, self.due = state, 0, now + self._config.heartbeat_s

    def _send_heartbeat(self) -> None:
        self._sent += 1
        self._send(Heartbeat(self.remote_request.handoff_id, self.lease, self._sent))

    def _send(self, message: Heartbeat | Release | Cancel) -> None:
        assert self.source is not None
        self._out.messages.append((self.source, message))

    def _note(self, line: str) -> None:
        self._out.lines.append((self.remote_request.request_id, f"{self.remote_request.handoff_id} decode: {line}"))
