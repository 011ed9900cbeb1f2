"""All handoffs of one engine, decode's side (inbound.py) and prefill's (outbound.py). Pure: no clock, socket or thread.

    decode                                  prefill
    open, reserves blocks
      ── RemotePrefillRequest (a call by Serve) ──▶  accept                     a lease begins
      ◀─ Progress(blocks so far) ───────────  after each chunk, and in answer to each heartbeat
      ── Heartbeat(n) ──────────────────────▶  extends the lease         every second, and after each read
         reads the new blocks, one-sided
      ◀─ Progress(all blocks, first token) ─
         reads the last blocks
      ── Release ───────────────────────────▶  Closed: gives the blocks up
      ◀─ Released(held) ────────────────────
    Received

Messages may be lost, doubled, late and out of order, and either side may stop for a while or die.

Why what decode keeps is right. Only `Closed` ends prefill's claim on the blocks, and a closed handoff answers no
heartbeat with Progress. So when prefill handles a heartbeat with Progress, the blocks have been the handoff's own until
this moment. Decode sends a heartbeat after a read has ended. When its echo comes back, the read was over before prefill
handled the heartbeat, and what it brought is right, whatever becomes of prefill afterwards. Such blocks are called
proven; they outlive a failed handoff. Release proves all blocks at once: it is first sent when all reads are over, and
none is started later; Released(held=True) says that it found the handoff open. All this is an order of causes, not of
clocks, so no drift, no suspended machine and no late timer can make it false. What a read brought that is not proven,
say because prefill was stopped past the lease and then reused the blocks, is never counted.

Why local blocks are not written late. Failed is told when every rank has said that it writes nothing more for the
handoff. If a rank does not say so, though asked again and again for 2 x progress_s, the engine must end (`broken`):
blocks that somebody may still write into can neither be used nor freed, and only the end of the process is sure to stop
a writer that does not answer. The replica is replaced, and its requests are replayed elsewhere.

Why nothing is held for ever. Prefill's claim ends one lease after the newest heartbeat. Decode sends heartbeats only
while it waits for blocks or reads them. Each of its waits for a message ends by a count of unanswered ones; a read that
stands still is ended by its agent, one that crawls by READ_LIMIT; waiting in prefill's queue ends by the request's own
deadline (`cancel`).

Who is meant. A handoff_id is never used twice, an engine is known by the epoch of its start, and a handoff is bound to
the first engine that answers for it, and to the lease that it names: should that engine get the ticket a second time,
after the first lease has ended, it counts as another. Another one that got the same ticket is told to cancel, and so is
one that goes on with a handoff that is over here. Anything else from the past is dropped, and counted.
"""

from __future__ import annotations

from itertools import count

from engine.config import HandoffConfig
from engine.kv_transfer.protocol.decode_side import DecodeHandoff, State
from engine.kv_transfer.protocol.effects import Effects
from engine.kv_transfer.protocol.messages import (
    Cancel,
    DropSource,
    Envelope,
    FirstToken,
    Heartbeat,
    Progress,
    ReadEnded,
    Refused,
    Release,
    Released,
)
from engine.kv_transfer.protocol.prefill_side import PrefillHandoff
from engine.wire.handoff_stats import HandoffInfo, HandoffStats
from engine.wire.remote_prefill import Peer, RemotePrefillRequest

REMEMBER_S = 60.0  # answers to repeated Releases, and sources of which nothing is read any more
RESTS = ("silent", "read", "chain")  # failures that speak against the link between two engines


class HandoffProtocol:
    """`now`: seconds on any clock that does not go back. What is to be done about a call is in `out` after it."""

    def __init__(self, config: HandoffConfig, party: Peer, *, ranks: list[dict[str, bytes]], block_size: int):
        self.party, self.out = party, Effects()
        self.inbound: dict[str, DecodeHandoff] = {}
        self.outbound: dict[str, PrefillHandoff] = {}
        self._config, self._ranks, self._block_size = config, ranks, block_size
        self._read_ids = count(1)
        self._reads: dict[int, DecodeHandoff] = {}
        self._leases = count(1)
        self._released: dict[int, tuple[Peer, float]] = {}  # lease -> its decode engine, when to forget it
        self._rests: dict[str, float] = {}  # engine -> until when
        self._idle_sources: dict[int, float] = {}  # epoch -> when to forget it

    @property
    def broken(self) -> str | None:
        """Why this engine must end."""
        for inbound in self.inbound.values():
            if inbound.unstoppable:
                assert inbound.reading is not None
                ranks = ", ".join(map(str, sorted(inbound.reading.waiting)))
                return f"rank {ranks} does not stop reading for handoff {inbound.ticket.handoff_id}"
        return None

    # -- decode --------------------------------------------------------------------------------------------

    def open(self, ticket: RemotePrefillRequest, blocks: list[int], now: float) -> None:
        missing = len(ticket.token_ids) - ticket.skip
        assert missing > 0 and ticket.skip % self._block_size == 0, "skip must leave something, and whole blocks"
        assert len(blocks) == -(-missing // self._block_size), "one block for every block_size tokens from skip on"
        self.inbound[ticket.handoff_id] = DecodeHandoff(
            ticket,
            blocks,
            config=self._config,
            block_size=self._block_size,
            num_ranks=len(self._ranks),
            new_read_id=lambda: self._new_read(ticket.handoff_id),
            is_resting=self._rests.__contains__,
            out=self.out,
            now=now,
        )

    def ticket_failed(self, handoff_id: str, reason: str, retry: bool, now: float) -> None:
        self._fail(handoff_id, "ticket_failed", now, reason, retry)

    def cancel(self, handoff_id: str, now: float) -> None:
        self._fail(handoff_id, "cancelled", now)

    def read_ended(self, message: ReadEnded, now: float) -> None:
        inbound = self._reads.get(message.read_id)
        if inbound is None:
            self.out.counters.stale_messages += 1
            return
        inbound.on_read_ended(message, now)
        if inbound.reading is None or inbound.reading.read_id != message.read_id:
            del self._reads[message.read_id]
        self._settle(inbound, now)

    # -- prefill -------------------------------------------------------------------------------------------

    def accept(self, ticket: RemotePrefillRequest, now: float) -> None:
        assert ticket.handoff_id not in self.outbound, "a ticket is accepted once"
        self.outbound[ticket.handoff_id] = PrefillHandoff(
            ticket, self._ranks, next(self._leases), config=self._config, out=self.out, now=now
        )

    def progress(self, handoff_id: str, upto: int, blocks: list[int], now: float) -> None:
        if outbound := self.outbound.get(handoff_id):
            outbound.progress(upto, blocks, now)

    def finish(self, handoff_id: str, first: FirstToken, now: float) -> None:
        if outbound := self.outbound.get(handoff_id):
            outbound.finish(first, now)

    def refuse(self, ticket: RemotePrefillRequest, reason: str, now: float) -> None:
        if outbound := self.outbound.get(ticket.handoff_id):
            outbound.refuse(reason, now)
        else:
            self.out.messages.append((ticket.decode, Refused(ticket.handoff_id, 0, reason)))

    # -- both ----------------------------------------------------------------------------------------------

    def receive(self, envelope: Envelope, now: float) -> None:
        sender, message = envelope.sender, envelope.message
        if envelope.to_epoch != self.party.epoch:
            self.out.counters.stale_messages += 1  # for an engine that was here before
        elif isinstance(message, Progress | Refused | Released):
            self._from_prefill(sender, message, now)
        else:
            self._from_decode(sender, message, now)

    def tick(self, now: float) -> None:
        """Call at `due`, or later."""
        for inbound in list(self.inbound.values()):
            inbound.tick(now)
            self._settle(inbound, now)
        for outbound in list(self.outbound.values()):
            outbound.tick(now)
            self._drop_if_over(outbound)
        for lease in [n for n, (_, until) in self._released.items() if now >= until]:
            del self._released[lease]
        for engine_id in [e for e, until in self._rests.items() if now >= until]:
            del self._rests[engine_id]
        for epoch in [e for e, until in self._idle_sources.items() if now >= until]:
            self._drop_source(epoch)

    @property
    def due(self) -> float | None:
        """When to call `tick`; None: no handoff needs it."""
        times = [inbound.due for inbound in self.inbound.values()]
        times += [outbound.due for outbound in self.outbound.values()]
        return min(times, default=None)

    def resting(self) -> list[str]:
        return sorted(self._rests)

    def stats(self) -> HandoffStats:
        return self.out.counters.stats(len(self.inbound) + len(self.outbound), self.resting())

    def snapshot(self, now: float) -> list[HandoffInfo]:
        return [
            HandoffInfo(
                handoff_id=inbound.ticket.handoff_id,
                request_id=inbound.ticket.request_id,
                role="decode",
                peer=inbound.source.engine_id if inbound.source else "",
                state=inbound.state.value,
                age_s=now - inbound.opened_at,
                deadline_s=inbound.deadline_s(now),
                num_bytes=inbound.num_bytes,
            )
            for inbound in self.inbound.values()
        ] + [
            HandoffInfo(
                handoff_id=outbound.ticket.handoff_id,
                request_id=outbound.ticket.request_id,
                role="prefill",
                peer=outbound.decode.engine_id,
                state=outbound.state,
                age_s=now - outbound.accepted_at,
                deadline_s=outbound.lease_until - now,
            )
            for outbound in self.outbound.values()
        ]

    def leave(self, now: float) -> None:
        """This engine is about to end."""
        for handoff_id in list(self.inbound):
            self.cancel(handoff_id, now)
        for outbound in self.outbound.values():
            outbound.refuse("the engine ends", now)

    # -- parts ---------------------------------------------------------------------------------------------

    def _from_prefill(self, sender: Peer, message: Progress | Refused | Released, now: float) -> None:
        inbound = self.inbound.get(message.handoff_id)
        if inbound is None or (inbound.source and (inbound.source, inbound.lease) != (sender, message.lease)):
            self.out.counters.stale_messages += 1
            if isinstance(message, Progress):  # nobody reads from it: it need not wait for the end of its lease
                self.out.messages.append((sender, Cancel(message.handoff_id, message.lease)))
            return
        if isinstance(message, Progress):
            inbound.on_progress(sender, message, now)
        elif isinstance(message, Refused):
            inbound.on_refused(sender, message, now)
        else:
            inbound.on_released(message, now)
        self._settle(inbound, now)

    def _from_decode(self, sender: Peer, message: Heartbeat | Release | Cancel, now: float) -> None:
        outbound = self.outbound.get(message.handoff_id)
        if outbound is None or (outbound.decode, outbound.lease) != (sender, message.lease):
            self._about_a_closed_one(sender, message)
            return
        if isinstance(message, Heartbeat):
            outbound.on_heartbeat(message.number, now)
        elif isinstance(message, Release):
            outbound.on_release(now)
            self._released[message.lease] = (sender, now + REMEMBER_S)
            self.out.messages.append((sender, Released(message.handoff_id, message.lease, held=True)))
        else:
            outbound.on_cancel(now)
        self._drop_if_over(outbound)

    def _about_a_closed_one(self, sender: Peer, message: Heartbeat | Release | Cancel) -> None:
        released = self._released.get(message.lease)
        held = released is not None and released[0] == sender
        if not held:
            self.out.counters.stale_messages += 1
        if isinstance(message, Release):
            self.out.messages.append((sender, Released(message.handoff_id, message.lease, held)))
        elif isinstance(message, Heartbeat) and not held:  # a late one of a released handoff needs no answer
            self.out.messages.append((sender, Refused(message.handoff_id, message.lease, "unknown")))

    def _fail(self, handoff_id: str, reason: str, now: float, detail: str = "", retry: bool | None = None) -> None:
        if inbound := self.inbound.get(handoff_id):
            inbound.fail(reason, now, detail, retry)
            self._settle(inbound, now)

    def _new_read(self, handoff_id: str) -> int:
        inbound = self.inbound[handoff_id]
        assert inbound.source is not None
        read_id = next(self._read_ids)
        self._reads[read_id] = inbound
        self._idle_sources.pop(inbound.source.epoch, None)
        return read_id

    def _settle(self, inbound: DecodeHandoff, now: float) -> None:
        """Forget it if it is over, and remember what it says about the link to its source."""
        if inbound.state is not State.OVER:
            return
        del self.inbound[inbound.ticket.handoff_id]
        source = inbound.source
        if source is None:
            return
        in_use = any(other.source == source for other in self.inbound.values())
        if not in_use:
            self._idle_sources[source.epoch] = now + REMEMBER_S
        if inbound.failure is not None and inbound.failure[0] in RESTS:
            self._rests[source.engine_id] = now + self._config.quarantine_s
            if not in_use:
                self._drop_source(source.epoch)  # the next attempt begins with new connections

    def _drop_source(self, epoch: int) -> None:
        self._idle_sources.pop(epoch, None)
        self.out.commands.append(DropSource(epoch))

    def _drop_if_over(self, outbound: PrefillHandoff) -> None:
        if outbound.over:
            del self.outbound[outbound.ticket.handoff_id]
