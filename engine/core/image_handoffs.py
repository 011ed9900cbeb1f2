"""Images that encode engines compute for this one. Pure Python."""

from __future__ import annotations

from collections import OrderedDict

from engine.core.handoffs import HandoffOutput
from engine.kv_transfer.protocol.actions import OpenHandoff
from engine.kv_transfer.protocol.events import Failed, HandoffEvent, Received
from engine.wire.messages import CancelDispatch, DispatchPrefill
from engine.wire.multimodal import MultiModalFeatureSpec, PlaceholderRange
from engine.wire.plan import ReceivedImage
from engine.wire.remote_prefill import Peer, RemotePrefillRequest
from engine.wire.sampling_params import SamplingParams

TIMEOUT_S = 10.0  # after which an image that waits in an encode engine is encoded here


class ImageHandoffs:
    """Handoffs of images: to an encode engine an image is a prompt of placeholders, whose KV is its embeddings.

    They arrive in blocks of their own, from which a step copies them into the encoder cache.
    """

    def __init__(self, peer: Peer, fingerprint: str, image_token_id: int, num_blocks: int, block_size: int):
        """peer: this engine, as encode engines know it. fingerprint: theirs."""
        self.available = False
        """Whether an encode engine is up."""
        self.actions: list[HandoffOutput] = []
        self.fingerprint = fingerprint
        self._peer, self._image_token_id = peer, image_token_id
        self._block_size, self._free = block_size, list(range(num_blocks))
        self._count = 0
        self._receiving: dict[str, tuple[bytes, list[int]]] = {}  #: hash and blocks by handoff id
        self._awaited: set[bytes] = set()
        self._ready: OrderedDict[bytes, list[int]] = OrderedDict()  #: blocks by hash, the oldest first
        self._failed: set[bytes] = set()  #: to be encoded here

    def awaits(self, image: MultiModalFeatureSpec) -> bool:
        """Return whether an encode engine is at work on an image, after asking for it if one can be."""
        key = image.mm_hash
        if key in self._awaited:
            return True
        if key in self._ready or key in self._failed or not self.available:
            return False
        needed = -(-image.num_embeds // self._block_size)
        while len(self._free) < needed and self._ready:
            self._free += self._ready.popitem(last=False)[1]
        if len(self._free) < needed:
            return False
        self._open(image, [self._free.pop() for _ in range(needed)])
        return True

    def take(self, image: MultiModalFeatureSpec) -> ReceivedImage | None:
        """Return an image that has come, whose blocks are the step's until `release`; None if it is encoded here."""
        self._failed.discard(image.mm_hash)
        blocks = self._ready.pop(image.mm_hash, None)
        return None if blocks is None else ReceivedImage(image.mm_hash, blocks, image.num_embeds)

    def release(self, received: list[ReceivedImage]) -> None:
        """End a step, which has copied these."""
        for image in received:
            self._free += image.blocks

    def handle(self, event: HandoffEvent) -> None:
        """Record the end of a handoff."""
        if not isinstance(event, Received | Failed):
            return
        key, blocks = self._receiving.pop(event.handoff_id)
        self._awaited.discard(key)
        if isinstance(event, Received):
            self._ready[key] = blocks
        else:
            self._free += blocks
            self._failed.add(key)
            self.actions.append(CancelDispatch(event.handoff_id))

    def _open(self, image: MultiModalFeatureSpec, blocks: list[int]) -> None:
        self._count += 1
        place = PlaceholderRange(0, image.num_embeds)
        request = RemotePrefillRequest(
            handoff_id=f"{image.mm_hash.hex()}/{self._peer.epoch:x}.{self._count}",
            request_id=image.mm_hash.hex(),
            attempt=1,
            token_ids=[self._image_token_id] * image.num_embeds,
            num_prompt=image.num_embeds,
            params=SamplingParams(temperature=0.0),
            seed=0,
            cache_salt="",
            skip=0,
            fingerprint=self.fingerprint,
            decode=self._peer,
            timeout_s=TIMEOUT_S,
            mm_features=[MultiModalFeatureSpec(data=image.data, mm_hash=image.mm_hash, mm_position=place,
                                               num_embeds=image.num_embeds)],
        )  # fmt: skip
        self._receiving[request.handoff_id] = image.mm_hash, blocks
        self._awaited.add(image.mm_hash)
        self.actions += [OpenHandoff(request, blocks), DispatchPrefill(request, "encode")]

    def owns(self, handoff_id: str) -> bool:
        return handoff_id in self._receiving

    def check(self, num_blocks: int) -> None:
        """Raise AssertionError if the blocks do not add up, while no step is planned."""
        held = [*self._ready.values(), *(blocks for _, blocks in self._receiving.values())]
        assert sorted([*self._free, *(block for blocks in held for block in blocks)]) == list(range(num_blocks))
