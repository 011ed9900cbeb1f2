"""Tells other engines what they could fetch from this one."""

from __future__ import annotations

import msgspec

from engine.core.mail.courier import Courier, Server
from engine.core.output import Event
from engine.parts.kv_fetching.prefix_counter import PrefixCounter
from engine.wire.messages import Answer
from engine.wire.parts.kv_fetching import HotPrefixes, ListHotPrefixes
from engine.wire.remote_request import Peer


class FetchCourier(Courier):
    def __init__(self, peer: Peer, prefixes: PrefixCounter):
        """peer: this engine as others address it."""
        self._peer, self._prefixes = peer, prefixes

    def take(self, command: msgspec.Struct, server: Server) -> bool:
        if not isinstance(command, ListHotPrefixes):
            return False
        server.tell(Answer.to(command, HotPrefixes(self._peer, self._prefixes.hottest(command.limit))))
        return True

    def seen(self, event: Event) -> None:
        if event.delta.token_ids and not event.delta.position:
            self._prefixes.observe(event.request)
