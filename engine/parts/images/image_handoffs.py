"""Images that encode engines compute for this one. Pure Python."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgspec

from engine.core.door.outputs import Outputs
from engine.wire.handoff import Failed, HandoffEvent, OpenHandoff, Received
from engine.wire.parts.handoffs import CancelDispatch, DispatchRemote, PrefillReplica
from engine.wire.parts.images import MultiModalFeatureSpec, PlaceholderRange, PromptImages, ReceivedImage
from engine.wire.remote_request import Peer, RemoteRequest
from engine.wire.sampling_params import SamplingParams

TIMEOUT_S = 10.0  # that an image may wait in an encode engine before it is encoded here
AHEAD = 2  # images requested ahead per encode engine: it always has a next one, and no queue
MAX_FAILED = 1000  # failed images remembered, to be encoded here; their requests may have ended

Note = Callable[[str], None]  # adds an event to the timeline of a request


def number_of(handoff_id: str) -> str:
    """Return the part of a handoff's id that says nothing of the image."""
    return handoff_id.rpartition("/")[2]


class NoImageHandoffs:
    """Stand-in for ImageHandoffs in an engine without encode engines."""

    fingerprint = ""

    def __init__(self) -> None:
        self.replicas: list[PrefillReplica] = []
        self.resting: list[str] = []
        self.out = Outputs()

    def awaits(self, image: MultiModalFeatureSpec, note: Note, *, ahead: bool = False) -> bool:
        return False

    def has(self, mm_hash: bytes) -> bool:
        return False

    def take(self, image: MultiModalFeatureSpec, note: Note) -> ReceivedImage | None:
        return None

    def release(self, received: list[ReceivedImage]) -> None:
        pass

    def handle(self, event: HandoffEvent) -> None:
        pass

    def owns(self, handoff_id: str) -> bool:
        return False


class ImageHandoffs:
    """Handoffs of images. To an encode engine an image is a prompt of placeholders, and its embeddings are that
    prompt's KV. The embeddings arrive in separate blocks, from which a step copies them into the encoder cache."""

    def __init__(self, peer: Peer, fingerprint: str, image_token_id: int, num_blocks: int, block_size: int):
        """peer: this engine as encode engines address it. fingerprint: identity of the encoder; only encode engines
        with the same one give the same embeddings. num_blocks: blocks for embeddings that arrive."""
        self._peer, self.fingerprint = peer, fingerprint
        #: encode engines that are up
        self.replicas: list[PrefillReplica] = []
        #: ids of those whose link has just failed
        self.resting: list[str] = []
        self.out = Outputs()  # the scheduler's
        self._image_token_id, self._block_size, self._num_blocks = image_token_id, block_size, num_blocks
        self._free = list(range(num_blocks))
        self._count = 0
        self.receiving: dict[str, tuple[bytes, list[int]]] = {}  #: image hash and blocks, by handoff id
        self._awaited: set[bytes] = set()  #: hashes of the images in `receiving`
        self._ready: OrderedDict[bytes, tuple[list[int], str]] = OrderedDict()
        """Blocks and the engine that sent them, by image hash, oldest first."""
        self._failed: dict[bytes, str] = {}  #: reason by hash, for images to be encoded here

    def awaits(self, image: MultiModalFeatureSpec, note: Note, *, ahead: bool = False) -> bool:
        """Return whether an encode engine is working on an image, after asking one if possible.

        ahead: the image is for a later step. For such an image, no image that has arrived is evicted, and half of the
        blocks are left to images that other requests need now.
        """
        key = image.mm_hash
        if key in self._awaited:
            return True
        if key in self._ready or key in self._failed or not (engines := self._available()):
            return False
        needed = -(-image.num_embeds // self._block_size)
        if ahead:
            if len(self._awaited) >= AHEAD * engines or len(self._free) - needed < self._num_blocks // 2:
                return False
        elif len(self._free) + sum(len(blocks) for blocks, _ in self._ready.values()) < needed:
            return False
        while len(self._free) < needed:
            self._free += self._ready.popitem(last=False)[1][0]
        self._open(image, [self._free.pop() for _ in range(needed)])
        note(f"an image of {image.num_embeds} tokens is to be encoded by an encode engine")
        return True

    def has(self, mm_hash: bytes) -> bool:
        """Return whether an image has arrived, or an encode engine is working on it."""
        return mm_hash in self._awaited or mm_hash in self._ready

    def take(self, image: MultiModalFeatureSpec, note: Note) -> ReceivedImage | None:
        """Return an image that has arrived, or None if this engine has to encode it. The step owns the image's blocks
        until `release`."""
        if (reason := self._failed.pop(image.mm_hash, None)) is not None:
            note(f"an image is encoded here, since no encode engine has: {reason}")
        if (ready := self._ready.pop(image.mm_hash, None)) is None:
            return None
        blocks, engine_id = ready
        note(f"received an image from {engine_id}")
        return ReceivedImage(image.mm_hash, blocks, image.num_embeds)

    def release(self, received: list[ReceivedImage]) -> None:
        """Free the blocks of these images, which a step has copied."""
        for image in received:
            self._free += image.blocks

    def handle(self, event: HandoffEvent) -> None:
        """Record the progress of a handoff."""
        if not isinstance(event, Received | Failed):
            return
        key, blocks = self.receiving.pop(event.handoff_id)
        self._awaited.remove(key)
        if isinstance(event, Received):
            self._ready[key] = blocks, next((step.where for step in event.first.timeline), "an encode engine")
            return
        self._free += blocks
        self._failed[key] = event.reason
        if len(self._failed) > MAX_FAILED:
            del self._failed[next(iter(self._failed))]
        self.out.post("control", CancelDispatch(event.handoff_id))

    def owns(self, handoff_id: str) -> bool:
        return handoff_id in self.receiving

    def id_of(self, number: str) -> str:
        """Return the id of the handoff under way that has this number (number_of)."""
        return next(handoff_id for handoff_id in self.receiving if number_of(handoff_id) == number)

    def check(self, planned: Iterable[ReceivedImage] = ()) -> None:
        """Raise AssertionError if the blocks do not add up. planned: images of steps that have not ended."""
        held = [blocks for blocks, _ in self._ready.values()] + [blocks for _, blocks in self.receiving.values()]
        held += [image.blocks for image in planned]
        found = sorted([*self._free, *(block for blocks in held for block in blocks)])
        assert found == list(range(self._num_blocks)), "blocks of images are lost"
        assert self._awaited == {key for key, _ in self.receiving.values()}, (
            "an image waits for a handoff that does not exist"
        )

    def _available(self) -> int:
        return sum(replica.engine_id not in self.resting for replica in self.replicas)

    def _open(self, image: MultiModalFeatureSpec, blocks: list[int]) -> None:
        self._count += 1
        name, peer = image.mm_hash.hex(), self._peer
        place = PlaceholderRange(0, image.num_embeds)
        request = RemoteRequest(
            handoff_id=f"{name}/{peer.epoch:x}.{self._count}",
            request_id=name,
            attempt=1,
            token_ids=[self._image_token_id] * image.num_embeds,
            num_prompt=image.num_embeds,
            params=SamplingParams(temperature=0.0),
            seed=0,
            cache_salt="",
            skip=0,
            fingerprint=self.fingerprint,
            decode=peer,
            timeout_s=TIMEOUT_S,
        ).asking(PromptImages([msgspec.structs.replace(image, mm_position=place)]))
        self.receiving[request.handoff_id] = image.mm_hash, blocks
        self._awaited.add(image.mm_hash)
        self.out.post("encode engines", OpenHandoff(request, blocks))
        self.out.post("control", DispatchRemote(request, "encode"))
