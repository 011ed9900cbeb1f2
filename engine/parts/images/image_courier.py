"""Carries images between this engine and encode engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.parts.handoffs.channel_courier import ChannelCourier
from engine.parts.images.inputs import EncodersRest, ImageWentOn

if TYPE_CHECKING:  # it needs pyzmq
    from engine.kv_transfer.channel import HandoffChannel


class ImageCourier(ChannelCourier):
    def __init__(self, channel: HandoffChannel):
        super().__init__(channel, "encode engines", ImageWentOn, EncodersRest)
