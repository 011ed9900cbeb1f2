"""What a request names, by which it is recognized if engines end with it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from engine.black_box import compile_key, compute_key, found_keys, read_key
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.adapter import ModelAdapter, digest_of
from engine.wire.parts.images import images_in
from engine.wire.parts.pooling import PoolingParams
from engine.wire.parts.speculation import Prediction


class Named(NamedTuple):
    """What a request names, and what an engine does with it."""

    digest: str
    what: str
    """For the client, after "engines have ended while they"."""
    is_own: bool = False
    """Whether it is only the request itself, so that another request of the same step may be the cause."""


def named_adapter(lora: ModelAdapter) -> Named:
    return Named(read_key(lora.digest), f"read adapter {lora.name!r}")


def _named(request: GenerateRequest) -> list[Named]:
    """Return what other requests may name too, and engines read or compile."""
    lora = request.record(ModelAdapter)
    found = [] if lora is None else [named_adapter(lora)]
    if (grammar := request.params.structured_outputs) is not None:
        found.append(Named(compile_key(grammar.kind, grammar.text), "compiled its grammar or schema"))
    return found


def _images(request: GenerateRequest) -> Named:
    hashes = " ".join(feature.mm_hash.hex() for feature in images_in(request))
    return Named(f"images {hashes}", "computed its images", is_own=True)


def _own(request: GenerateRequest) -> Named:
    """The prompt, and all that decides what is computed; not what names one request."""
    lora = request.record(ModelAdapter)
    images = [feature.mm_hash for feature in images_in(request)]
    params = msgspec.structs.replace(request.params, seed=None)
    pooling, prediction = request.record(PoolingParams), request.record(Prediction)
    what = msgspec.msgpack.encode([request.prompt, params, pooling, digest_of(lora), images, prediction])
    return Named(hashlib.blake2b(what, digest_size=16).hexdigest(), "computed this request", is_own=True)


def suspected(request: GenerateRequest, request_id: str, doing: Sequence[str], *, began: bool) -> Named | None:
    """Return for what a request is suspected, or None if it is not. request_id: that of the attempt. doing: what its
    engine was doing when it ended by itself. began: whether it had any token before."""
    for possible in _named(request):
        if found_keys(doing, [possible.digest]):
            return possible
    if not found_keys(doing, [compute_key(request_id)]):
        return None
    return _images(request) if images_in(request) and not began else _own(request)


def all_named(request: GenerateRequest) -> list[Named]:
    """Return all for which a request may be refused."""
    return [*_named(request), *([_images(request)] if images_in(request) else []), _own(request)]
