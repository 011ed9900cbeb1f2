"""All that one engine needs for its handoffs, put together at rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable

from engine.config import HandoffConfig
from engine.core.handoffs import Cancel, Finish, Forget, HandoffManager, Open, Refuse, Report
from engine.core.remote_prefill_policy import RemotePrefillPolicy
from engine.core.request_log import RequestLog
from engine.core.step_cost import StepCost
from engine.errors import InvalidParameter
from engine.kv_transfer.channel import HandoffChannel
from engine.kv_transfer.protocol.events import HandoffEvent
from engine.kv_transfer.transport.ranks import RankAgent
from engine.kv_transfer.transport.worker import KVTransferWorker
from engine.wire.handoff_stats import HandoffInfo, HandoffStats
from engine.wire.messages import CancelDispatch, DispatchPrefill, PrefillReplica
from engine.wire.remote_prefill import RemotePrefillRequest

logger = logging.getLogger(__name__)


class HandoffEndpoint:
    """Between the scheduler's ledger and the channel. Of the step loop's thread, but for the channel's own.

    ledger: for the scheduler. fingerprint: of what the KV depends on; engines whose fingerprints differ cannot use each
    other's.
    """

    def __init__(
        self,
        config: HandoffConfig,
        agent: KVTransferWorker,
        ranks: list[RankAgent],
        *,
        engine_id: str,
        host: str,
        fingerprint: str,
        block_size: int,
        step_cost: StepCost,
        wake: Callable[[], None],
        journal: RequestLog,
    ):
        """agent: rank 0's; closed by `close`. ranks: as of start_agent. step_cost: of this engine, as learned by its
        owner. wake, journal: see HandoffChannel."""
        self.config, self.fingerprint = config, fingerprint
        self._agent = agent
        self._channel = HandoffChannel(
            config,
            engine_id=engine_id,
            host=host,
            fingerprint=fingerprint,
            agent_addresses=[rank.address for rank in ranks],
            ranks=[rank.description for rank in ranks],
            block_size=block_size,
            wake=wake,
            journal=journal,
        )
        self._placing = (
            RemotePrefillPolicy(config, step_cost, self._channel.resting) if config.role == "decode" else None
        )
        self.ledger = HandoffManager(self._placing, self._channel.party, fingerprint)
        self._notices: list[DispatchPrefill | CancelDispatch] = []
        self._closed = False

    def events(self) -> list[HandoffEvent]:
        """What the scheduler has to handle. Raises EngineUnavailable when this engine cannot go on."""
        return self._channel.events()

    def forward(self) -> None:
        """Do what the ledger asks for."""
        channel = self._channel
        for action in self.ledger.outbox:
            match action:
                case Open(ticket, blocks):
                    channel.open(ticket, blocks)
                    self._notices.append(DispatchPrefill(ticket))
                case Cancel(handoff_id):
                    channel.cancel(handoff_id)
                    self._notices.append(CancelDispatch(handoff_id))
                case Forget(handoff_id):
                    self._notices.append(CancelDispatch(handoff_id))
                case Report(handoff_id, upto, blocks):
                    channel.progress(handoff_id, upto, blocks)
                case Finish(handoff_id, first):
                    channel.finish(handoff_id, first)
                case Refuse(ticket, reason):
                    channel.refuse(ticket, reason)
        self.ledger.outbox.clear()

    def notices(self) -> list[DispatchPrefill | CancelDispatch]:
        """For the control actor, since the last call."""
        notices, self._notices = self._notices, []
        return notices

    # -- commands ------------------------------------------------------------------------------------------

    def check(self, ticket: RemotePrefillRequest) -> None:
        """Raise RequestError if what is computed here would be of no use there."""
        if ticket.fingerprint != self.fingerprint:
            raise InvalidParameter("fingerprint", ticket.fingerprint, f"that of this engine ({self.fingerprint})")

    def accept(self, ticket: RemotePrefillRequest) -> None:
        self._channel.accept(ticket)

    def refuse(self, ticket: RemotePrefillRequest, reason: str) -> None:
        logger.warning("refused a ticket handoff_id=%s reason=%s", ticket.handoff_id, reason)
        self._channel.refuse(ticket, reason)

    def ticket_failed(self, handoff_id: str, reason: str, retry: bool) -> None:
        self._channel.ticket_failed(handoff_id, reason, retry)

    def set_prefill_pool(self, replicas: list[PrefillReplica]) -> None:
        if self._placing is not None:
            self._placing.replicas = replicas

    # -- state ---------------------------------------------------------------------------------------------

    def stats(self) -> HandoffStats:
        return self._channel.stats()

    def live(self) -> list[HandoffInfo]:
        return self._channel.snapshot()

    def close(self) -> None:
        """More than once does no harm."""
        if not self._closed:
            self._closed = True
            self._channel.close()
            self._agent.close()
