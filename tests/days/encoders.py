"""Images in prompts, and encode engines that compute them for the others. The vision encoder is modelled: an embedding
depends on the hash of its image, and on its place in the image."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from engine.clock import Clock
from engine.config import EngineConfig
from engine.core.request import Request
from engine.parts.images.encoder_cache_manager import EncoderCacheManager
from engine.parts.images.image_handoffs import ImageHandoffs
from engine.parts.kept import images_of
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.images import (
    NO_IMAGES,
    ImageStep,
    MultiModalFeatureSpec,
    PlaceholderRange,
    PromptImages,
    TensorData,
    mm_hash,
)
from engine.wire.parts.speculation import Prediction
from engine.wire.plan import StepPlan, StepResult
from tests.days.engine import Channel, Engine
from tests.days.model import IMAGE, Runner, alone, chain, embedding, inputs
from tests.days.part import Part
from tests.days.remains import check_protocol, nothing

if TYPE_CHECKING:
    from deployments.routing.config import Role
    from tests.days.day import Ask, Day
    from tests.days.world import World

ENCODE_STEPS = 2.0  # times `step_s`, for which an image is encoded
MAX_IMAGES, MAX_EMBEDS, ROOM = 3, 9, 12


# -- the model -----------------------------------------------------------------------------------------------------


class Inbox:
    """Memory into which embeddings from encode engines are read."""

    def __init__(self, num_blocks: int, block_size: int):
        self._blocks: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._read_until = [0.0] * num_blocks  # when the newest step ends that copies it

    def read(self, block: int, now: float) -> list[int | None]:
        raise AssertionError("nobody reads an inbox")

    def write(self, block: int, kv: list[int | None], now: float) -> None:
        assert now >= self._read_until[block], "a step copies an image that another engine writes over"
        self._blocks[block] = kv

    def used_until(self, block: int) -> float:
        return self._read_until[block]

    def rows(self, blocks: list[int]) -> list[int | None]:
        return [value for block in blocks for value in self._blocks[block]]

    def copied(self, blocks: list[int], ends_at: float) -> None:
        """Record when the step ends that copies these blocks."""
        for block in blocks:
            self._read_until[block] = ends_at


class ImageRunner(Runner):
    """Checks that the embeddings of each image are there when a step needs them."""

    inbox: Inbox

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._embeddings: dict[bytes, list[int | None]] = {}  # by image
        self._places: dict[int, list[tuple[int, bytes, int]]] = {}  # by slot: place, image, index of the embedding

    def prepare(self, plan: StepPlan) -> StepPlan:
        for sequence in plan.added:
            sent = sequence.record(PromptImages)
            self._places[sequence.slot] = [
                (place, image.mm_hash, index)
                for image in ([] if sent is None else sent.images)
                for index, place in enumerate(_places(sequence.tokens, image))
            ]
        return super().prepare(plan)

    def launch(self, plan: StepPlan) -> tuple[float, StepResult]:
        cache, images = self._embeddings, plan.record(ImageStep) or NO_IMAGES
        if images.encoded:
            took = ENCODE_STEPS * self.step_s * len(images.encoded)
            self._free_at = max(self._free_at, self._clock.world()) + took
        for key in images.forgotten:
            del cache[key]
        for received in images.received:
            cache[received.mm_hash] = self.inbox.rows(received.blocks)[: received.num_embeds]
        for image in images.encoded:
            key = mm_hash(image.data)
            cache[image.mm_hash] = [embedding(key, index) for index in range(image.num_embeds)]
        for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True):
            for place, key, index in self._places.get(slot, ()):
                if start <= place < start + count:
                    assert key in cache, "an image is computed without its embeddings"
                    assert cache[key][index] == embedding(key, index), "an image has the embeddings of another"
        ends_at, result = super().launch(plan)
        for received in images.received:
            self.inbox.copied(received.blocks, ends_at)
        return ends_at, result


class EncodeRunner(ImageRunner):
    """Keeps embeddings in place of KV."""

    def _append(self, slot: int, token: int) -> None:
        self._history[slot].append(token)


def _places(tokens: Sequence[int], image: MultiModalFeatureSpec) -> list[int]:
    return [i for i in range(image.mm_position.offset, image.mm_position.end) if tokens[i] == IMAGE]


# -- engines ---------------------------------------------------------------------------------------------------------


class ImageEngine(Engine):
    """An engine whose model takes images."""

    make_runner = ImageRunner

    @property
    def whole_images(self) -> int:  # type: ignore[override]
        images = self.cluster.size.images
        assert images is not None
        return images.whole

    def kv_of(self, request: Request, start: int, end: int, before: int) -> list[int]:
        return chain(inputs(request.tokens, images_of(request))[start:end], before)

    def make_images(self, config: EngineConfig, clock: Clock) -> list[EncoderCacheManager]:
        size = self.cluster.size.images
        assert size is not None
        images = EncoderCacheManager(size.cache, config.max_num_batched_tokens, IMAGE, size.whole)
        if config.encode is not None:
            num_blocks = -(-size.cache // config.block_size)
            assert isinstance(self.runner, ImageRunner)
            self.runner.inbox = Inbox(num_blocks, config.block_size)
            channel = Channel(self, config.encode, f"images:{self.engine_id}", self.runner.inbox, clock)
            self.channels.append(channel)
            self.image_channel = channel  # type: ignore[assignment]
            images.handoffs = ImageHandoffs(
                channel.peer,
                fingerprint=EncodeEngine.fingerprint,
                image_token_id=IMAGE,
                num_blocks=num_blocks,
                block_size=config.block_size,
            )
        return [images]

    def check(self) -> None:
        super().check()
        handoffs = self.core.scheduler.parts[EncoderCacheManager].handoffs
        if isinstance(handoffs, ImageHandoffs):
            planned = [plan.record(ImageStep) or NO_IMAGES for plan, _ in self.core.scheduler.planned]
            handoffs.check([image for step in planned for image in step.received])


class EncodeEngine(ImageEngine):
    make_runner = EncodeRunner
    fingerprint = "print of the encoder"

    def names(self) -> dict[bytes, list[int]]:
        return self.cluster.named_embeddings

    def kv_of(self, request: Request, start: int, end: int, before: int) -> list[int]:
        return inputs(request.tokens, images_of(request))[start:end]


def engine_class(images: Images | None, role: Role) -> type[Engine]:
    return Engine if images is None else EncodeEngine if role == "encode" else ImageEngine


# -- the part of a day -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Images:
    """encoders: encode engines. cache: embeddings that an engine caches. whole: see Engine.whole_images."""

    encoders: int
    cache: int
    whole: int

    def open(self, world: World) -> Part:
        return ImagePart(world)


class ImagePart(Part):
    def __init__(self, world: World):
        self._cluster = world.cluster

    def check_end(self) -> None:
        for deployment in self._cluster.deployments.values():
            for replica in deployment.replicas:
                handoffs, engine = replica.engine.core.scheduler.parts[EncoderCacheManager].handoffs, replica.engine
                if isinstance(handoffs, ImageHandoffs) and engine.alive and not engine.paused:
                    engine.check()
                    nothing(f"{replica.engine_id}: images on their way", handoffs.receiving)
                    check_protocol(replica.engine_id, engine.channels[1])

    def count(self) -> None:
        seen = self._cluster.seen
        for engine in self._cluster.engines.values():
            images = engine.core.scheduler.parts[EncoderCacheManager]
            what = "by an encode engine" if isinstance(engine, EncodeEngine) else "by an engine that needs it"
            seen[f"image encoded {what}"] += images.num_encoded
            seen["image found in the encoder cache"] += images.num_hits
            for channel in engine.channels[1:]:
                for result, counts in channel.endpoint.stats().results.items():
                    for why, count in counts.items():
                        seen[f"image {result} {why}".strip()] += count


def add(day: Day, rng: random.Random) -> Day:
    """Give some days images, and most of these encode engines."""
    if rng.random() < 0.75:
        return day
    size, whole = day.size, 0
    if size.max_num_batched_tokens >= MAX_EMBEDS + 1 + size.max_num_seqs and rng.random() < 0.3:
        whole = MAX_EMBEDS + 1
    plan = Images(rng.choice([0, 1, 1, 2]), rng.choice([MAX_EMBEDS, 16, 64]), whole)
    album = [_image(rng) for _ in range(rng.choice([2, 4, 8]))]
    chance = rng.random()  # a request that is sent twice has the same images
    asks = tuple(
        _with_images(random.Random(f"{chance} {ask.requests[0].request_id}"), ask, album, size.max_model_len)
        for ask in day.asks
    )
    return replace(day, size=replace(size, images=plan), asks=asks, parts=(*day.parts, plan))


def _image(rng: random.Random) -> MultiModalFeatureSpec:
    data = {"pixel_values": TensorData("uint8", (4,), rng.randbytes(4))}
    return MultiModalFeatureSpec(
        data=data, mm_hash=mm_hash(data), mm_position=PlaceholderRange(0, 0), num_embeds=rng.randrange(1, MAX_EMBEDS)
    )


def _with_images(rng: random.Random, ask: Ask, album: list[MultiModalFeatureSpec], max_model_len: int) -> Ask:
    """Put some images into the prompt of a request."""
    prompt, images = list(ask.requests[0].prompt), []
    end = 0
    for _ in range(rng.choice([0, 1, 1, 2, MAX_IMAGES])):
        image = rng.choice(album)
        tokens = [IMAGE] * image.num_embeds
        if rng.random() < 0.3 and len(tokens) > 1:
            tokens.insert(rng.randrange(1, len(tokens)), 7)  # ends a row
        offset = min(len(prompt), end + rng.choice([0, 0, 4, rng.randrange(20)]))
        if len(prompt) + len(tokens) > max_model_len - ROOM:
            break
        prompt[offset:offset] = tokens
        end = offset + len(tokens)
        images.append(msgspec.structs.replace(image, mm_position=PlaceholderRange(offset, len(tokens))))
    if not images:
        return ask

    def changed(request: GenerateRequest) -> GenerateRequest:
        request = msgspec.structs.replace(request, prompt=prompt).asking(PromptImages(images))
        if request.record(Prediction) is not None:
            request = request.asking(Prediction(alone(request, max_model_len)[0]))
        return request

    return replace(ask, requests=tuple(map(changed, ask.requests)))
