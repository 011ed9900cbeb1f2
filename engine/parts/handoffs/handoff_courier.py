"""Carries handoffs between this engine and others."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from engine.core.engine import EngineCore
from engine.errors import ServingError
from engine.parts.handoffs.channel_courier import ChannelCourier
from engine.parts.handoffs.inputs import AddedRemote, HandoffWentOn, LinksRest
from engine.wire.handoff import AcceptPrefill, RefusePrefill
from engine.wire.remote_request import RemoteRequest

if TYPE_CHECKING:  # it needs pyzmq
    from engine.kv_transfer.channel import HandoffChannel

logger = logging.getLogger(__name__)


class HandoffCourier(ChannelCourier):
    def __init__(self, channel: HandoffChannel):
        super().__init__(channel, "engines", HandoffWentOn, LinksRest)

    def prefill(self, core: EngineCore, asked_by: RemoteRequest) -> bool:
        """Compute a prompt for another engine. Returns False if it is refused. That engine is told either way."""
        if asked_by.handoff_id in core.scheduler.queue.live:
            return True  # the request came twice
        try:
            core.admit(AddedRemote(asked_by))
        except ServingError as error:
            logger.warning("refused a prefill request handoff_id=%s reason=%s", asked_by.handoff_id, error)
            self.channel.submit(RefusePrefill(asked_by, str(error)))
            return False
        self.channel.submit(AcceptPrefill(asked_by))
        return True
