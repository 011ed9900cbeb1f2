"""All handoffs of one engine: decode's side (decode_side.py) and prefill's (prefill_side.py). Pure: no clock or socket.

    decode                                    prefill
    OpenHandoff: blocks are reserved
      ── RemoteRequest (Serve call) ─▶  AcceptPrefill              a lease begins
      ◀─ Progress(blocks so far) ───────────  after each chunk, and in answer to each heartbeat
      ── Heartbeat(n) ──────────────────────▶  extends the lease          every second, and after each read
         reads the new blocks, one-sided
      ◀─ Progress(all blocks, first token) ─
         reads the last blocks
      ── Release ───────────────────────────▶  Closed: gives the blocks up
      ◀─ Released(held) ────────────────────
    Received

Messages may be lost, duplicated, late or out of order, and either side may pause or die.

**Blocks that decode keeps are correct.** Only `Closed` ends prefill's claim on the blocks, and a closed handoff answers
no heartbeat with Progress. So whenever prefill answers a heartbeat with Progress, the blocks have belonged to the
handoff up to that moment. Decode sends a heartbeat after a read has ended. Once the echo returns, the read had ended
before prefill handled the heartbeat, so the blocks read are correct, even if prefill fails afterwards. Such blocks are
called validated, and outlive a failed handoff. Release validates all blocks at once: it is sent only after all reads
have ended, and Released(held=True) confirms that the handoff was still open then. The argument relies on the order of
messages, not on clocks, so clock drift, suspended machines and late timers cannot break it. Blocks that were read but
not validated never count: prefill may have been paused past the lease and then have reused them.

**A request that moves** is treated as a prompt that is computed already. The prompt is the request's tokens; the token
after them, which no client has seen, takes the place of the first token. Its engine holds it (HoldRequest) until
another engine claims it over the same channel, without a Serve call. From HoldRequest on, everything above applies.
Only the first engine that claims the request gets it.

**Fetched blocks** are blocks of a prefix that another engine has cached. They are asked for by name (Fetch) over the
same channel, and held for the asking engine like those of a prompt that is computed already. A name is the hash of all
tokens up to the block's end, so an engine that has a block of that name has the right one. The answer has a FirstToken
without a token. If the other engine has only the first of the blocks, only these are handed over.

**Local blocks are never written late.** Failed follows only after every rank has confirmed that it writes nothing more
for the handoff. If a rank does not confirm although it is asked repeatedly for 2 x progress_s, the engine must end
(`broken`). Blocks that may still be written can neither be used nor freed, and only the end of the process is sure to
stop a writer that does not answer. The replica is replaced, and its requests are retried elsewhere.

**Nothing is held forever.** Prefill's claim ends one lease after the newest heartbeat. Decode sends heartbeats only
while it waits for blocks or reads them. Every wait for a message ends after a number of unanswered heartbeats. The KV
worker ends a read that stalls, READ_LIMIT ends a read that is too slow, and the request's own deadline ends a wait in
prefill's queue (CancelHandoff).

**No engine is mistaken for another.** A handoff_id is never reused, an engine is identified by the epoch of its start,
and a handoff is bound to the first engine that answers and to the lease that it names. If that engine accepts the
request again after the first lease has ended, it counts as another engine. Another engine that got the same request
receives a Cancel. So does an engine that sends Progress of a handoff that has ended here. Any other stale message is
dropped and counted.
"""

from __future__ import annotations

from itertools import count
from math import inf

from engine.kv_transfer.protocol.decode_side import DecodeHandoff, DecodeHandoffState
from engine.kv_transfer.protocol.effects import Effects
from engine.kv_transfer.protocol.messages import (
    Cancel,
    Claim,
    DropSource,
    Envelope,
    Fetch,
    Heartbeat,
    Progress,
    ReadEnded,
    Refused,
    Release,
    Released,
)
from engine.kv_transfer.protocol.prefill_side import HeldRequest, PrefillHandoff
from engine.options.handoff import HandoffConfig
from engine.wire.handoff import (
    AcceptPrefill,
    BlocksAsked,
    CancelHandoff,
    FinishPrefill,
    HandoffAction,
    HoldBlocks,
    HoldRequest,
    Leave,
    OpenHandoff,
    Quarantine,
    RefusePrefill,
    ReportProgress,
)
from engine.wire.parts.handoffs import RemoteRequestFailed
from engine.wire.remote_request import NOBODY, Peer, RemoteRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.stats.handoff_stats import HandoffInfo, HandoffStats

REMEMBER_S = 60.0  # how long released leases, and sources from which nothing is read any more, are remembered
LINK_FAILURES = ("silent", "read", "prompt_hash")  # failures for which the link between two engines is to blame


class HandoffProtocol:
    """All handoffs of one engine. After every call, `out` holds the effects to carry out.

    `now` is in seconds, on any clock that does not go backwards.
    """

    def __init__(self, config: HandoffConfig, peer: Peer, *, ranks: list[dict[str, bytes]], block_size: int):
        self.peer, self.out = peer, Effects()
        self.decode_handoffs: dict[str, DecodeHandoff] = {}
        self.prefill_handoffs: dict[str, PrefillHandoff] = {}
        self._config, self._ranks, self._block_size = config, ranks, block_size
        self._read_ids = count(1)
        self._reads: dict[int, DecodeHandoff] = {}
        self._leases = count(1)
        self._asked: set[str] = set()  # handoffs of a Fetch that the step loop has not answered
        #: lease -> (its decode engine, the answer, when to forget the lease)
        self._released: dict[int, tuple[Peer, Released, float]] = {}
        self._quarantined: dict[str, float] = {}  # engine -> until when
        self._idle_sources: dict[int, float] = {}  # epoch -> when to forget it

    @property
    def broken(self) -> str | None:
        """Reason why this engine must end, or None."""
        for handoff in self.decode_handoffs.values():
            if handoff.unstoppable:
                assert handoff.reading is not None
                ranks = ", ".join(map(str, sorted(handoff.reading.waiting)))
                return f"rank {ranks} does not stop reading for handoff {handoff.remote_request.handoff_id}"
        return None

    def apply(self, action: HandoffAction, now: float) -> None:
        """Carry out an action of the step loop."""
        match action:
            case OpenHandoff():
                self._open(action, now)
            case CancelHandoff(handoff_id, paid_ns):
                self._fail(handoff_id, "cancelled", now, paid_ns=paid_ns)
            case RemoteRequestFailed(handoff_id, reason, retry):
                self._fail(handoff_id, "remote_prefill_failed", now, reason, retry)
            case Quarantine(engine_id):
                self._quarantined[engine_id] = inf
                for handoff_id, reading in list(self.decode_handoffs.items()):
                    if reading.source is not None and reading.source.engine_id == engine_id:
                        self._fail(handoff_id, "corrupt", now, f"KV from {engine_id} was wrong")
            case AcceptPrefill(remote_request):
                self._accept(remote_request, now)
            case HoldRequest(remote_request):
                self.prefill_handoffs[remote_request.handoff_id] = HeldRequest(
                    action,
                    self._ranks,
                    next(self._leases),
                    self._block_size,
                    config=self._config,
                    out=self.out,
                    now=now,
                )
            case HoldBlocks(remote_request):
                self._asked.discard(remote_request.handoff_id)
                self._accept(remote_request, now, action)
            case ReportProgress(handoff_id):
                if handoff := self.prefill_handoffs.get(handoff_id):
                    handoff.report(action, now)
            case FinishPrefill(handoff_id, first):
                if handoff := self.prefill_handoffs.get(handoff_id):
                    handoff.finish(first, now)
            case RefusePrefill(remote_request, reason):
                self._asked.discard(remote_request.handoff_id)
                if handoff := self.prefill_handoffs.get(remote_request.handoff_id):
                    handoff.refuse(reason, now)
                    self._drop_if_over(handoff)
                elif remote_request.decode is not NOBODY:
                    self.out.messages.append((remote_request.decode, Refused(remote_request.handoff_id, 0, reason)))
            case Leave():
                for handoff_id in list(self.decode_handoffs):
                    self._fail(handoff_id, "cancelled", now)
                for handoff in list(self.prefill_handoffs.values()):
                    handoff.refuse("the engine ends", now)
                    self._drop_if_over(handoff)

    def read_ended(self, message: ReadEnded, now: float) -> None:
        handoff = self._reads.get(message.read_id)
        if handoff is None:
            self.out.counters.stale_messages += 1
            return
        handoff.on_read_ended(message, now)
        if handoff.reading is None or handoff.reading.read_id != message.read_id:
            del self._reads[message.read_id]
        self._conclude(handoff, now)

    def receive(self, envelope: Envelope, now: float) -> None:
        sender, message = envelope.sender, envelope.message
        if envelope.to_epoch != self.peer.epoch:
            self.out.counters.stale_messages += 1  # meant for an earlier engine at this address
        elif isinstance(message, Progress | Refused | Released):
            self._from_prefill(sender, message, now)
        elif isinstance(message, Claim):
            self._claimed(sender, message, now)
        elif isinstance(message, Fetch):
            self._fetched(sender, message, now)
        else:
            self._from_decode(sender, message, now)

    def tick(self, now: float) -> None:
        """Act on elapsed time. Call it at `due` or later."""
        for handoff in list(self.decode_handoffs.values()):
            handoff.tick(now)
            self._conclude(handoff, now)
        for leased in list(self.prefill_handoffs.values()):
            leased.tick(now)
            self._drop_if_over(leased)
        for lease in [n for n, (_, _, until) in self._released.items() if now >= until]:
            del self._released[lease]
        for engine_id in [e for e, until in self._quarantined.items() if now >= until]:
            del self._quarantined[engine_id]
        for epoch in [e for e, until in self._idle_sources.items() if now >= until]:
            self._drop_source(epoch)

    @property
    def due(self) -> float | None:
        """Time of the next `tick`; None if no handoff needs one."""
        times = [handoff.due for handoff in self.decode_handoffs.values()]
        times += [handoff.due for handoff in self.prefill_handoffs.values()]
        return min(times, default=None)

    def quarantined(self) -> list[str]:
        return sorted(self._quarantined)

    def stats(self) -> HandoffStats:
        return self.out.counters.stats(len(self.decode_handoffs) + len(self.prefill_handoffs), self.quarantined())

    def snapshot(self, now: float) -> list[HandoffInfo]:
        return [
            HandoffInfo(
                handoff_id=handoff.remote_request.handoff_id,
                request_id=handoff.remote_request.request_id,
                role="decode",
                peer=handoff.source.engine_id if handoff.source else "",
                state=handoff.state.value,
                age_s=now - handoff.opened_at,
                deadline_s=handoff.deadline_s(now),
                num_bytes=handoff.num_bytes,
            )
            for handoff in self.decode_handoffs.values()
        ] + [
            HandoffInfo(
                handoff_id=handoff.remote_request.handoff_id,
                request_id=handoff.remote_request.request_id,
                role="prefill",
                peer=handoff.decode.engine_id,
                state=handoff.state,
                age_s=now - handoff.accepted_at,
                deadline_s=handoff.lease_until - now,
            )
            for handoff in self.prefill_handoffs.values()
        ]

    # -- parts ---------------------------------------------------------------------------------------------

    def _open(self, action: OpenHandoff, now: float) -> None:
        remote_request = action.remote_request
        missing = len(remote_request.token_ids) - remote_request.skip
        assert missing > 0 and remote_request.skip % self._block_size == 0, (
            "skip must be a whole number of blocks and leave tokens to compute"
        )
        assert len(action.blocks) <= -(-missing // self._block_size), "more blocks than tokens from skip on"
        self.decode_handoffs[remote_request.handoff_id] = DecodeHandoff(
            action,
            config=self._config,
            block_size=self._block_size,
            num_ranks=len(self._ranks),
            new_read_id=lambda: self._new_read(remote_request.handoff_id),
            is_quarantined=self._quarantined.__contains__,
            out=self.out,
            now=now,
        )

    def _accept(self, remote_request: RemoteRequest, now: float, held: HoldBlocks | None = None) -> None:
        assert remote_request.handoff_id not in self.prefill_handoffs, "a prefill request is accepted only once"
        self.prefill_handoffs[remote_request.handoff_id] = PrefillHandoff(
            remote_request, self._ranks, next(self._leases), config=self._config, out=self.out, now=now, held=held
        )

    def _from_prefill(self, sender: Peer, message: Progress | Refused | Released, now: float) -> None:
        handoff = self.decode_handoffs.get(message.handoff_id)
        if handoff is None or (handoff.source and (handoff.source, handoff.lease) != (sender, message.lease)):
            self.out.counters.stale_messages += 1
            if isinstance(message, Progress):  # nothing reads its blocks, so it need not keep them until its lease ends
                self.out.messages.append((sender, Cancel(message.handoff_id, message.lease)))
            return
        if isinstance(message, Progress):
            handoff.on_progress(sender, message, now)
        elif isinstance(message, Refused):
            handoff.on_refused(sender, message, now)
        else:
            handoff.on_released(message, now)
        self._conclude(handoff, now)

    def _from_decode(self, sender: Peer, message: Heartbeat | Release | Cancel, now: float) -> None:
        handoff = self.prefill_handoffs.get(message.handoff_id)
        if handoff is None or (handoff.decode, handoff.lease) != (sender, message.lease):
            self._answer_for_closed(sender, message)
            return
        if isinstance(message, Heartbeat):
            handoff.on_heartbeat(message.number, now)
        elif isinstance(message, Release):
            released = Released(message.handoff_id, message.lease, held=True, byte_ns=handoff.byte_ns(now))
            handoff.close("released", now)
            self._released[message.lease] = (sender, released, now + REMEMBER_S)
            self.out.messages.append((sender, released))
        else:
            handoff.close("cancelled", now, message.paid_ns)
        self._drop_if_over(handoff)

    def _claimed(self, sender: Peer, message: Claim, now: float) -> None:
        held, problem = self.prefill_handoffs.get(message.handoff_id), "unknown"
        if not isinstance(held, HeldRequest) or (problem := held.claim(sender, message, now) or ""):
            self.out.messages.append((sender, Refused(message.handoff_id, 0, problem)))
            if held is not None:
                self._drop_if_over(held)

    def _fetched(self, sender: Peer, message: Fetch, now: float) -> None:
        """Let the step loop, which knows its cache, answer a Fetch, once."""
        if held := self.prefill_handoffs.get(message.handoff_id):
            held.on_fetch(now)
        elif message.handoff_id not in self._asked:
            self._asked.add(message.handoff_id)
            asked = RemoteRequest(
                handoff_id=message.handoff_id,
                request_id=message.request_id,
                attempt=1,
                token_ids=[],
                num_prompt=0,
                params=SamplingParams(),
                seed=0,
                cache_salt="",
                skip=message.skip,
                fingerprint=message.fingerprint,
                decode=sender,
                timeout_s=message.timeout_s,
            )
            self.out.events.append(BlocksAsked(asked, message.upto, message.names))

    def _answer_for_closed(self, sender: Peer, message: Heartbeat | Release | Cancel) -> None:
        released = self._released.get(message.lease)
        held = released is not None and released[0] == sender
        if not held:
            self.out.counters.stale_messages += 1
        if isinstance(message, Release):
            not_held = Released(message.handoff_id, message.lease, held=False)
            self.out.messages.append((sender, released[1] if released is not None and held else not_held))
        elif isinstance(message, Heartbeat) and not held:  # a late heartbeat of a released handoff needs no answer
            self.out.messages.append((sender, Refused(message.handoff_id, message.lease, "unknown")))

    def _fail(
        self, handoff_id: str, reason: str, now: float, detail: str = "", retry: bool | None = None, paid_ns: int = 0
    ) -> None:
        if handoff := self.decode_handoffs.get(handoff_id):
            handoff.fail(reason, now, detail, retry, paid_ns)
            self._conclude(handoff, now)

    def _new_read(self, handoff_id: str) -> int:
        handoff = self.decode_handoffs[handoff_id]
        assert handoff.source is not None
        read_id = next(self._read_ids)
        self._reads[read_id] = handoff
        self._idle_sources.pop(handoff.source.epoch, None)
        return read_id

    def _conclude(self, handoff: DecodeHandoff, now: float) -> None:
        """Forget a handoff that is over, and quarantine its source if the link to it has failed."""
        if handoff.state is not DecodeHandoffState.OVER:
            return
        del self.decode_handoffs[handoff.remote_request.handoff_id]
        source = handoff.source
        if source is None:
            return
        in_use = any(other.source == source for other in self.decode_handoffs.values())
        if not in_use:
            self._idle_sources[source.epoch] = now + REMEMBER_S
        if handoff.failure is not None and handoff.failure[0] in LINK_FAILURES:
            until = now + self._config.quarantine_s
            self._quarantined[source.engine_id] = max(until, self._quarantined.get(source.engine_id, until))
            if not in_use:
                self._drop_source(source.epoch)  # the next attempt begins with new connections

    def _drop_source(self, epoch: int) -> None:
        self._idle_sources.pop(epoch, None)
        self.out.commands.append(DropSource(epoch))

    def _drop_if_over(self, handoff: PrefillHandoff) -> None:
        if handoff.over:
            del self.prefill_handoffs[handoff.remote_request.handoff_id]
