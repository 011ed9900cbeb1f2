"""What a snapshot of a scheduler has of images."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.parts.images.encoder_cache_manager import EncoderCacheManager, NoImages
from engine.parts.images.image_handoffs import ImageHandoffs, NoImageHandoffs, number_of
from engine.parts.snapshot_kinds import SnapshotKinds
from engine.wire.parts.images import ImageStep, MultiModalFeatureSpec, PromptImages, ReceivedImage


def of_image_handoffs(handoffs: ImageHandoffs) -> dict[str, Any]:
    receiving = {number_of(handoff_id): image for handoff_id, image in handoffs.receiving.items()}
    return {"receiving": receiving}


def without_data(image: MultiModalFeatureSpec) -> MultiModalFeatureSpec:
    return msgspec.structs.replace(image, data={})


KINDS = SnapshotKinds(
    objects=(EncoderCacheManager, ImageHandoffs, NoImageHandoffs, NoImages),
    messages=(ImageStep, MultiModalFeatureSpec, ReceivedImage, PromptImages),
    changes={EncoderCacheManager: lambda _: {"_pixels": {}}, ImageHandoffs: of_image_handoffs},
    stands_for={MultiModalFeatureSpec: without_data},
)
