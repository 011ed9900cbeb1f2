"""Decides which images have their embeddings on the device. Pure Python."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from engine.core.door.kernel import Kernel
from engine.core.door.part import Part
from engine.core.request import Request
from engine.core.step_plan_builder import StepPlanBuilder
from engine.errors import InvalidParameter
from engine.parts.images.image_handoffs import ImageHandoffs, NoImageHandoffs, Note
from engine.parts.kept import IMAGES, images_of
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.images import (
    ImageStats,
    ImageStep,
    MultiModalFeatureSpec,
    PromptImages,
    ReceivedImage,
    TensorData,
    images_in,
    places_of,
)
from engine.wire.plan import StepPlan
from engine.wire.remote_request import RemoteRequest


class NoImages(Part):
    """Of a model that reads text only."""

    asks = PromptImages

    def check(self, asked: GenerateRequest | RemoteRequest, prompt: Sequence[int]) -> None:
        if images := images_in(asked):
            raise InvalidParameter("mm_features", len(images), "left out: this model reads text only")


class EncoderCacheManager(Part):
    """Decides which images a step encodes, and which embeddings it evicts to make room: the least recently used.

    Embeddings are cached by the hash of their image, so an image is encoded once for all requests while it stays
    cached. A step never evicts embeddings that it needs itself. After vLLM's class of this name.
    """

    asks = PromptImages

    def __init__(self, size: int, budget: int, image_token_id: int, mm_tokens_per_image: int = 0):
        """size: capacity in embeddings.
        budget: embeddings that one step is allowed to make; a single image can exceed it.
        mm_tokens_per_image: as in VisionConfig."""
        self._size, self._budget, self.image_token_id = size, budget, image_token_id
        self._mm_tokens_per_image = mm_tokens_per_image
        self._cached: OrderedDict[bytes, int] = OrderedDict()  #: sizes by image hash, least recently used first
        self._in_step: set[bytes] = set()
        self._encoded: list[MultiModalFeatureSpec] = []
        self._forgotten: list[bytes] = []
        self._pixels = WeakValueDictionary[bytes, TensorData]()  #: of live requests, by hash
        self._received: list[ReceivedImage] = []
        self.handoffs: ImageHandoffs | NoImageHandoffs = NoImageHandoffs()
        """Handoffs of images from encode engines; None without such engines."""
        self.num_embeds = 0  #: embeddings in the cache
        self.num_encoded = 0  #: images, since the start
        self.num_hits = 0  #: times that an image was found in the cache

    @property
    def whole_images(self) -> bool:
        """Whether one step must compute all tokens of an image, because they attend to each other."""
        return self._mm_tokens_per_image > 0

    def up_to(self, request: Request, count: int) -> int:
        """Return how many of the next `count` tokens of a request come before the first image that has to wait for a
        later step, either to be encoded or to be computed whole."""
        if not request.prefix.places:
            return count
        start = request.computed
        images = [image for image in images_of(request) if start < image.mm_position.end]
        for image in images:
            span = image.mm_position
            if span.offset < start + count:
                is_cut = self.whole_images and span.end > start + count
                if is_cut or not self.take(image, request.note):
                    count = max(0, span.offset - start)
        self.ask_ahead(images, request.note)
        return count

    def shorten(self, request: Request, matched: int, block_size: int) -> int:
        """Return how many of the `matched` leading blocks can be used without splitting an image that must be whole."""
        if self.whole_images:
            for image in reversed(images_of(request)):
                span = image.mm_position
                if span.offset < matched * block_size < span.end:
                    matched = span.offset // block_size
        return matched

    def take(self, image: MultiModalFeatureSpec, note: Note) -> bool:
        """Provide the embeddings of an image for the step being planned. Returns False if the image has to wait.

        note: function that adds an event to the timeline of the request.
        """
        key, size = image.mm_hash, image.num_embeds
        if key in self._cached:
            self._cached.move_to_end(key)
            self.num_hits += 1
            self._in_step.add(key)
            return True
        if self.handoffs.awaits(image, note):
            return False
        if self._encoded and sum(other.num_embeds for other in self._encoded) + size > self._budget:
            return False
        while self.num_embeds + size > self._size:
            oldest = next(iter(self._cached))
            if oldest in self._in_step:
                return False
            self.num_embeds -= self._cached.pop(oldest)
            self._forgotten.append(oldest)
        self._cached[key] = size
        self._in_step.add(key)
        self.num_embeds += size
        received = self.handoffs.take(image, note)
        if received is not None:
            self._received.append(received)
            return True
        self._encoded.append(image)
        self.num_encoded += 1
        return True

    def ask_ahead(self, images: Iterable[MultiModalFeatureSpec], note: Note) -> None:
        """Ask encode engines for images that a request needs in later steps, so that they work in parallel."""
        for image in images:
            if image.mm_hash not in self._cached:
                self.handoffs.awaits(image, note, ahead=True)

    def attach(self, kernel: Kernel) -> None:
        super().attach(kernel)
        self.handoffs.out = kernel.out

    def opened(self, request: Request, asked: GenerateRequest | RemoteRequest) -> None:
        """Let the request share the pixels of an image that another live request has."""
        found = []
        for image in images_in(asked):
            data = dict(image.data)
            if "pixel_values" in data:  # else the encoder raises the error
                data["pixel_values"] = self._pixels.setdefault(image.mm_hash, data["pixel_values"])
            found.append(msgspec.structs.replace(image, data=data))
        if found:
            request.of[IMAGES], request.prefix.places = found, places_of(found)
            request.attach(PromptImages([image.without_pixels() for image in found]))

    def queued_embeds(self, requests: Iterable[Request]) -> int:
        """Return how many embeddings this engine still has to make for images that these requests have yet to compute.
        Counts an image only once if several requests have it."""
        missing = {
            image.mm_hash: image.num_embeds
            for request in requests
            for image in images_of(request)
            if request.computed < image.mm_position.end and image.mm_hash not in self._cached
        }
        return sum(count for mm_hash, count in missing.items() if not self.handoffs.has(mm_hash))

    def planned(self, plan: StepPlanBuilder, step: int) -> None:
        if self._encoded or self._forgotten or self._received:
            plan.attach(ImageStep(self._encoded, self._forgotten, self._received))
            self._encoded, self._forgotten, self._received = [], [], []
        self._in_step.clear()

    def step_ended(self, plan: StepPlan) -> None:
        """Free the blocks of images from encode engines, which the step has copied."""
        if (images := plan.record(ImageStep)) is not None:
            self.handoffs.release(images.received)

    def load(self, requests: Iterable[Request]) -> dict[str, Any]:
        return {"queued_embeds": self.queued_embeds(requests)}

    def report(self) -> ImageStats:
        return ImageStats(self.num_encoded, self.num_hits)

    def check(self, asked: GenerateRequest | RemoteRequest, prompt: Sequence[int]) -> None:
        """Raise InvalidParameter if an image could never be encoded, or does not fit its placeholders in the prompt."""
        end = 0
        for i, image in enumerate(images_in(asked)):
            name, span = f"mm_features[{i}]", image.mm_position
            if not end <= span.offset < span.end <= len(prompt):
                limit = f"behind the image before, in a prompt of {len(prompt)} tokens"
                raise InvalidParameter(f"{name}.mm_position", [span.offset, span.end], limit)
            end = span.end
            if self.whole_images and span.length > self._mm_tokens_per_image:
                limit = f"at most {self._mm_tokens_per_image}, the tokens that the model has for an image"
                raise InvalidParameter(f"{name}.mm_position.length", span.length, limit)
            found = prompt[span.offset : span.end].count(self.image_token_id)
            if not found == image.num_embeds <= self._size:
                limit = f"the number of its placeholders ({found}), and at most encoder_cache_size ({self._size})"
                raise InvalidParameter(f"{name}.num_embeds", image.num_embeds, limit)

    def audit(self, running: Sequence[Request]) -> None:
        """Raise AssertionError if the embeddings do not add up."""
        assert self.num_embeds == sum(self._cached.values()) <= self._size, "embeddings are lost"
        assert self._in_step <= set(self._cached), "a step drops embeddings that it needs"
