"""The side of one handoff that has the KV, computed or cached. Pure: no clock, socket or thread; see protocol.py.

Only Closed ends prefill's claim on the blocks.
"""

from __future__ import annotations

from engine.kv_transfer.protocol.effects import Effects
from engine.kv_transfer.protocol.messages import Claim, Progress, Refused
from engine.options.handoff import HandoffConfig
from engine.wire.handoff import NO_COST, Closed, FirstToken, HoldBlocks, HoldRequest, ReportProgress
from engine.wire.remote_request import NOBODY, Peer, RemoteRequest

RESEND_HEARTBEATS = 1.5  # silence, in heartbeats, before Progress is sent again: decode may never have received it


class PrefillHandoff:
    """A prompt that this engine computes for a decode engine, with the lease of its blocks."""

    def __init__(
        self,
        remote_request: RemoteRequest,
        ranks: list[dict[str, bytes]],
        lease: int,
        *,
        config: HandoffConfig,
        out: Effects,
        now: float,
        held: HoldBlocks | None = None,
    ):
        """held: cached blocks to hand over, if nothing is to be computed."""
        self.remote_request, self.decode, self.lease = remote_request, remote_request.decode, lease
        self.accepted_at = now
        self.over = False
        self.lease_until = now + config.lease_s
        self._ranks, self._config, self._out = ranks, config, out
        self._blocks: list[int] = []
        self._upto = remote_request.skip
        self._first: FirstToken | None = None
        self._cost, self._num_bytes, self._cost_at_ns = NO_COST, 0.0, 0
        self._refused: str | None = None
        self._echo = 0
        self._resend_at = now
        self._finished_at = now
        if held is not None:
            self._upto, self._blocks, self._first = held.upto, held.blocks, held.first
        self._tell(now)

    @property
    def state(self) -> str:
        if self._refused is not None:
            return "refused"
        return "computing" if self._first is None else "leased"

    # -- from the step loop --------------------------------------------------------------------------------

    def report(self, progress: ReportProgress, now: float) -> None:
        assert progress.blocks[: len(self._blocks)] == self._blocks, "blocks of a handoff must not change"
        self._upto, self._blocks = progress.upto, progress.blocks
        self._cost, self._num_bytes, self._cost_at_ns = progress.cost, progress.num_bytes, progress.at_ns
        self._tell(now)

    def finish(self, first: FirstToken, now: float) -> None:
        assert self._upto == len(self.remote_request.token_ids), "finished before all blocks were named"
        self._first, self._finished_at = first, now
        self._tell(now)

    def refuse(self, reason: str, now: float) -> None:
        """Notify decode that the prompt will not be completed. Decode may still be reading, so the blocks are held
        until decode cancels or the lease ends; heartbeats no longer extend the lease."""
        self._refused = reason
        self._tell(now)

    # -- from decode ---------------------------------------------------------------------------------------

    def on_fetch(self, now: float) -> None:
        """Answer a repeated Fetch."""
        self._tell(now)

    def on_heartbeat(self, number: int, now: float) -> None:
        if number > self._echo:
            self._echo = number
            if self._refused is None:
                self.lease_until = now + self._config.lease_s
        self._tell(now)

    # -- time ----------------------------------------------------------------------------------------------

    @property
    def due(self) -> float:
        return min(self.lease_until, self._resend_at)

    def tick(self, now: float) -> None:
        """Act on elapsed time. Call it at `due` or later."""
        if now >= self.lease_until:
            self._out.counters.lease_expiries += 1
            self._send(Refused(self.remote_request.handoff_id, self.lease, "expired"))
            self.close("expired", now)
        elif now >= self._resend_at:
            self._tell(now)

    # -- parts ---------------------------------------------------------------------------------------------

    def _tell(self, now: float) -> None:
        self._resend_at = now + RESEND_HEARTBEATS * self._config.heartbeat_s
        message: Progress | Refused
        if self._refused is not None:
            message = Refused(self.remote_request.handoff_id, self.lease, self._refused)
        else:
            message = Progress(
                handoff_id=self.remote_request.handoff_id,
                lease=self.lease,
                ranks=self._ranks,
                blocks=self._blocks,
                upto=self._upto,
                first=self._first,
                echo=self._echo,
                cost=self._cost,
            )
        self._send(message)

    def _send(self, message: Progress | Refused) -> None:
        if self.decode is not NOBODY:
            self._out.messages.append((self.decode, message))

    def byte_ns(self, now: float) -> float:
        """Return PromptCost.byte_ns until now, if as many others have shared the blocks since the newest report."""
        return self._cost.byte_ns + self._num_bytes * max(0, int(now * 1e9) - self._cost_at_ns)

    def close(self, reason: str, now: float, paid_ns: int = 0) -> None:
        self.over = True
        self._out.events.append(Closed(self.remote_request.handoff_id, reason, paid_ns))
        self._out.counters.ended("closed", reason)
        if self._first is not None:
            self._out.counters.phase("held", now - self._finished_at)


class HeldRequest(PrefillHandoff):
    """A request that moves. Its KV is complete and is held until another engine claims it. Once claimed, the request is
    like a prompt that this engine has computed for the other engine."""

    def __init__(
        self,
        held: HoldRequest,
        ranks: list[dict[str, bytes]],
        lease: int,
        block_size: int,
        *,
        config: HandoffConfig,
        out: Effects,
        now: float,
    ):
        self._groups, self._block_size = held.groups, block_size
        super().__init__(held.remote_request, ranks, lease, config=config, out=out, now=now)
        self._first = held.first

    @property
    def state(self) -> str:
        return "held" if self.decode is NOBODY else super().state

    def claim(self, sender: Peer, message: Claim, now: float) -> str | None:
        """Bind the request to the first engine that claims it. Returns None, or the reason why the sender cannot have
        it. If it cannot read the KV, nobody will: the request goes on there without it."""
        if self.decode is NOBODY:
            request = self.remote_request
            if message.fingerprint != request.fingerprint:
                self.close("cancelled", now)
                return f"fingerprint {message.fingerprint} is not that of this engine ({request.fingerprint})"
            skip = message.skip // self._block_size
            self.decode, self.lease_until = sender, now + self._config.lease_s
            self._upto = len(request.token_ids)
            self._blocks = [block for first, blocks in self._groups for block in blocks[max(0, skip - first) :]]
        elif self.decode != sender:
            return "another engine has claimed the request"
        self._tell(now)
        return None

    def refuse(self, reason: str, now: float) -> None:
        if self.decode is NOBODY:
            self.close("cancelled", now)
        else:
            super().refuse(reason, now)
