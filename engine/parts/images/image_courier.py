"""Carries images between this engine and encode engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from engine.core.mail.courier import Engine, Server
from engine.parts.handoffs.channel_courier import ChannelCourier
from engine.parts.images.encoder_cache_manager import EncoderCacheManager
from engine.parts.images.inputs import EncodersRest, EncodersSet, ImageWentOn
from engine.wire.parts.handoffs import PrefillReplicas, RemoteRequestFailed

if TYPE_CHECKING:  # it needs pyzmq
    from engine.kv_transfer.channel import HandoffChannel


class ImageCourier(ChannelCourier):
    def __init__(self, channel: HandoffChannel, images: EncoderCacheManager):
        super().__init__(channel, "encode engines", ImageWentOn, EncodersRest)
        self._images = images

    def take(self, command: msgspec.Struct, server: Server) -> bool:
        match command:
            case PrefillReplicas(replicas, "encode"):
                server.core.apply(EncodersSet(replicas))
            case RemoteRequestFailed(handoff_id) if self._images.handoffs.owns(handoff_id):
                self.channel.submit(command)
            case _:
                return False
        return True

    def status(self, core: Engine) -> dict[str, Any]:
        own = {"image_handoffs": self.channel.stats(), "encode_fingerprint": self._images.handoffs.fingerprint}
        return super().status(core) | own
