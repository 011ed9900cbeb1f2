"""What parts keep of a request for other parts to read."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.request import Request
from engine.wire.parts.adapter import ModelAdapter
from engine.wire.parts.images import MultiModalFeatureSpec
from engine.wire.remote_request import KVSource

ADAPTER, IMAGES, KV_SOURCE = "adapter", "images", "kv_source"  # in Request.of


def adapter_of(request: Request) -> ModelAdapter | None:
    """Return the adapter of a request."""
    return request.of.get(ADAPTER)


def images_of(request: Request) -> Sequence[MultiModalFeatureSpec]:
    """Return the images of a prompt, in order of position."""
    return request.of.get(IMAGES, ())


def source_of(request: Request) -> KVSource | None:
    """Return the engine from which a request moves here with its KV."""
    return request.of.get(KV_SOURCE)
