"""What enters a scheduler for its images."""

from __future__ import annotations

from engine.core.door.inputs import KernelWithParts, PartInput
from engine.parts.images.encoder_cache_manager import EncoderCacheManager
from engine.wire.handoff import HandoffEvent
from engine.wire.parts.handoffs import PrefillReplica


class ImageWentOn(PartInput, frozen=True):
    """An encode engine has sent an image, or has not."""

    event: HandoffEvent

    def apply(self, scheduler: KernelWithParts, now: float) -> None:
        scheduler.parts[EncoderCacheManager].handoffs.handle(self.event)


class EncodersRest(PartInput, frozen=True):
    """The encode engines that get no images for now, since the links to them have just failed."""

    engines: list[str]

    def apply(self, scheduler: KernelWithParts, now: float) -> None:
        scheduler.parts[EncoderCacheManager].handoffs.resting = self.engines


class EncodersSet(PartInput, frozen=True):
    """The encode engines that are up."""

    replicas: list[PrefillReplica]

    def apply(self, scheduler: KernelWithParts, now: float) -> None:
        scheduler.parts[EncoderCacheManager].handoffs.replicas = self.replicas
