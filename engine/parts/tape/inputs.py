"""What a tape keeps of what enters a scheduler, without text. From each shape an input can be made again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Literal, Union

import msgspec

from engine.core.door.inputs import Aborted, Added, Input
from engine.core.scheduler import Scheduler
from engine.errors import EngineError, RequestError, ServingError
from engine.parts.grammar.inputs import GrammarSet
from engine.parts.handoffs.inputs import AddedRemote, HandoffWentOn
from engine.parts.images.encoder_cache_manager import EncoderCacheManager
from engine.parts.images.image_handoffs import ImageHandoffs
from engine.parts.images.inputs import ImageWentOn
from engine.parts.kv_tiers.inputs import TiersAnswered
from engine.parts.snapshot_kinds import ORDINARY
from engine.parts.tape.answers import Answers, ReplayedGrammar
from engine.parts.tape.object_graph import MAX_ZEROS
from engine.wire.block_hash import BLOCK_HASH_BYTES
from engine.wire.generate_request import GenerateRequest
from engine.wire.handoff import BlocksAsked, Failed, FirstToken, HandoffEvent, Received
from engine.wire.handoff import Closed as ClosedEvent
from engine.wire.parts.adapter import ModelAdapter
from engine.wire.parts.images import MultiModalFeatureSpec, PlaceholderRange, PromptImages, images_in
from engine.wire.parts.kv_offload import FoundBlock, StoreListing, TierAnswer
from engine.wire.remote_request import RemoteRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.structured_outputs import StructuredOutputsParams
from engine.wire.token_delta import FinishReason

REMOTE = (ModelAdapter, PromptImages)
"""Records of requests to other engines."""
SOME_FORM = StructuredOutputsParams(regex=".*")


ErrorKind = Literal["none", "engine", "other"]
"""What a scheduler looks at in an error with which a request ends: whether its KV may be wrong."""


def kind_of(error: ServingError | None) -> ErrorKind:
    return "none" if error is None else "engine" if isinstance(error, EngineError) else "other"


def error_of(kind: ErrorKind) -> ServingError | None:
    errors = {"engine": EngineError("", "as it was recorded"), "other": RequestError("as it was recorded")}
    return errors.get(kind)


def stop_token(vocab_size: int) -> int:
    """Return the token that stands for all that end a request."""
    return vocab_size - 1


def ordinary(count: int) -> list[int]:
    """Return tokens. Raises ValueError for more than any model reads."""
    if not 0 <= count <= MAX_ZEROS:
        raise ValueError(f"a prompt of {count} tokens")
    return [ORDINARY] * count


def params_without_text(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """Return what the scheduler reads of a request's parameters."""
    return SamplingParams(
        max_tokens=params.max_tokens,
        ignore_eos=True,
        stop_token_ids=[stop_token(vocab_size)],
        prompt_logprobs=None if params.prompt_logprobs is None else 0,
        structured_outputs=None if params.structured_outputs is None else SOME_FORM,
        seed=0,
    )


def remote_without_text(request: RemoteRequest, params: SamplingParams) -> RemoteRequest:
    return msgspec.structs.replace(request, token_ids=[], params=params, cache_salt="", needs={}).asking(
        *(record.without_text() for kind in REMOTE if (record := request.record(kind)) is not None)
    )


class Shape(Input, frozen=True):
    """What a tape keeps of an input that says more than a tape may say."""

    def live(self, scheduler: Scheduler, answers: Answers) -> Input:
        """Return an input of the same shape."""
        raise NotImplementedError


class ImageShapes(msgspec.Struct, frozen=True, array_like=True):
    """Images of a prompt. Their hashes are on the tape under a number of arrival that no request has."""

    order: int
    spans: list[PlaceholderRange]
    num_embeds: list[int]

    @classmethod
    def of(cls, images: Sequence[MultiModalFeatureSpec], order: int) -> ImageShapes | None:
        if not images:
            return None
        return cls(order, [image.mm_position for image in images], [image.num_embeds for image in images])

    def prompt(self, num_tokens: int, scheduler: Scheduler) -> list[int]:
        """Return tokens with the placeholders of the images."""
        tokens = ordinary(num_tokens)
        image_token_id = scheduler.parts[EncoderCacheManager].image_token_id
        for span, count in zip(self.spans, self.num_embeds, strict=True):
            tokens[span.offset : span.offset + count] = [image_token_id] * count
        return tokens

    def images(self, answers: Answers) -> list[MultiModalFeatureSpec]:
        found = zip(answers.hashes[self.order], self.spans, self.num_embeds, strict=True)
        return [
            MultiModalFeatureSpec(data={}, mm_hash=mm_hash, mm_position=span, num_embeds=count)
            for mm_hash, span, count in found
        ]


class AddedShape(Shape, frozen=True):
    num_tokens: int
    message: GenerateRequest
    """Without tokens and images."""
    images: ImageShapes | None = None

    @classmethod
    def of(cls, message: GenerateRequest, scheduler: Scheduler, order: int) -> AddedShape:
        """order: as in ImageShapes."""
        vocab_size, kinds = scheduler.limits.vocab_size, scheduler.parts.asked
        records = [record for kind in kinds if (record := message.record(kind)) is not None]
        images = ImageShapes.of(images_in(message), order)
        return cls(len(message.prompt), images=images, message=GenerateRequest(
            request_id=message.request_id,
            prompt=[],
            params=params_without_text(message.params, vocab_size),
            client=message.client,
            timeout_s=message.timeout_s,
            priority=message.priority,
            prefill=message.prefill,
            num_prompt=message.num_prompt,
            ttft_slo_s=message.ttft_slo_s,
        ).asking(*(record.without_text() for record in records)))  # fmt: skip

    def live(self, scheduler: Scheduler, answers: Answers) -> Added:
        message = msgspec.structs.replace(self.message, prompt=ordinary(self.num_tokens))
        if self.images is not None:
            prompt, images = self.images.prompt(self.num_tokens, scheduler), self.images.images(answers)
            message = msgspec.structs.replace(message, prompt=prompt).asking(PromptImages(images))
        return Added(message)


class AddedRemoteShape(Shape, frozen=True):
    num_tokens: int
    request: RemoteRequest
    """Without tokens and images."""
    images: ImageShapes | None = None

    @classmethod
    def of(cls, asked_by: RemoteRequest, vocab_size: int, order: int) -> AddedRemoteShape:
        """order: as in ImageShapes."""
        shape = remote_without_text(asked_by, params_without_text(asked_by.params, vocab_size))
        return cls(len(asked_by.token_ids), shape, ImageShapes.of(images_in(asked_by), order))

    def live(self, scheduler: Scheduler, answers: Answers) -> AddedRemote:
        request = msgspec.structs.replace(self.request, token_ids=ordinary(self.num_tokens))
        if self.images is not None:
            tokens, images = self.images.prompt(self.num_tokens, scheduler), self.images.images(answers)
            request = msgspec.structs.replace(request, token_ids=tokens).asking(PromptImages(images))
        return AddedRemote(request)


class GrammarShape(Shape, frozen=True):
    request_id: str

    def live(self, scheduler: Scheduler, answers: Answers) -> GrammarSet:
        return GrammarSet(self.request_id, ReplayedGrammar(answers))


class AbortedShape(Shape, frozen=True):
    request_id: str
    reason: FinishReason
    error: ErrorKind

    def live(self, scheduler: Scheduler, answers: Answers) -> Aborted:
        return Aborted(self.request_id, self.reason, error_of(self.error))


class ReceivedShape(Shape, frozen=True):
    handoff_id: str
    cached: int
    token: int
    """The first token: ORDINARY, the one that stands for the end, or a negative one, which is an error."""
    engine_id: str = ""
    numerics: str = ""

    def live(self, scheduler: Scheduler, answers: Answers) -> HandoffWentOn:
        first = FirstToken(self.token, None, b"", self.cached, [], self.engine_id, self.numerics)
        return HandoffWentOn(Received(self.handoff_id, first))


class FailedShape(Shape, frozen=True):
    handoff_id: str
    reason: str
    verified: int
    retry: bool

    def live(self, scheduler: Scheduler, answers: Answers) -> HandoffWentOn:
        return HandoffWentOn(Failed(self.handoff_id, self.reason, self.verified, self.retry))


class ClosedShape(Shape, frozen=True):
    handoff_id: str
    reason: str

    def live(self, scheduler: Scheduler, answers: Answers) -> HandoffWentOn:
        return HandoffWentOn(ClosedEvent(self.handoff_id, self.reason))


class BlocksShape(Shape, frozen=True):
    """Another engine asks for blocks by their hashes, which are on the tape under a number of arrival that no request
    has."""

    order: int
    groups: list[int]
    """Hashes of each KV cache group."""
    upto: int
    request: RemoteRequest
    """Without tokens."""

    def live(self, scheduler: Scheduler, answers: Answers) -> HandoffWentOn:
        hashes = iter(answers.hashes.get(self.order, ()))
        names = [b"".join(islice(hashes, count)) for count in self.groups]
        return HandoffWentOn(BlocksAsked(self.request, self.upto, names))


def handoff_shape(event: HandoffEvent, token: int, order: int) -> Shape | None:
    """Return the shape of a handoff's progress; None for events that no decision depends on. token: as in
    ReceivedShape. order: as in BlocksShape."""
    match event:
        case BlocksAsked(request, upto, names):
            shape = remote_without_text(request, SamplingParams())
            return BlocksShape(order, [len(some) // BLOCK_HASH_BYTES for some in names], upto, shape)
        case Received(handoff_id, first):
            return ReceivedShape(handoff_id, first.cached, token, first.engine_id, first.numerics)
        case Failed(handoff_id, reason, verified, retry):
            return FailedShape(handoff_id, reason, verified, retry)
        case ClosedEvent(handoff_id, reason):
            return ClosedShape(handoff_id, reason)
        case _:
            return None


class ImageShape(Shape, frozen=True):
    """An encode engine has sent an image, or has not."""

    handoff: str
    """Id of the handoff without the hash of the image (`number_of`)."""
    failed: str | None
    """Why it has failed; None if it has not."""

    def live(self, scheduler: Scheduler, answers: Answers) -> ImageWentOn:
        handoffs = scheduler.parts[EncoderCacheManager].handoffs
        assert isinstance(handoffs, ImageHandoffs)
        handoff_id = handoffs.id_of(self.handoff)
        if self.failed is None:
            return ImageWentOn(Received(handoff_id, FirstToken(ORDINARY, None, b"", 0)))
        return ImageWentOn(Failed(handoff_id, self.failed, 0, retry=False))


class StoreShape(msgspec.Struct, frozen=True, array_like=True):
    """What other engines have done to the store. All names are on the tape under a number of arrival that no request
    has."""

    order: int
    added: list[tuple[int, float]]
    """Size and age of each block."""
    num_removed: int

    @classmethod
    def of(cls, listing: StoreListing, order: int) -> StoreShape:
        return cls(order, [(block.size, block.age_s) for block in listing.added], len(listing.removed))

    @staticmethod
    def names_of(listing: StoreListing) -> list[bytes]:
        return [*(block.name for block in listing.added), *listing.removed]

    def listing(self, answers: Answers) -> StoreListing:
        names = iter(answers.hashes.get(self.order, ()))
        added = [FoundBlock(next(names), size, age_s) for size, age_s in self.added]
        return StoreListing(added, list(islice(names, self.num_removed)))


class TiersAnsweredShape(Shape, frozen=True):
    listings: list[StoreShape]
    """Those come first."""
    answers: list[TierAnswer]

    def live(self, scheduler: Scheduler, answers: Answers) -> TiersAnswered:
        return TiersAnswered([*(listing.listing(answers) for listing in self.listings), *self.answers])


class CommitDetails(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What a step has yielded besides one token for each sequence that samples."""

    draft_s: float = 0.0
    counts: bytes = b""
    """Number of tokens of each entry; empty for one wherever the plan samples."""
    errors: dict[int, int] = {}
    """Negative tokens of prompts that other engines have asked for, by entry."""
    pooled: dict[int, bool] = {}
    """Entries that were pooled: whether all numbers are finite."""
    proposed: dict[int, list[int]] = {}
    """Tokens that a drafter with weights proposes, by entry: ORDINARY, NO_TOKEN or ON_DEVICE."""


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request has ended by the call before."""

    order: int
    """Its number of arrival."""
    request_id: str
    reason: str
    num_output: int
    row: int = -1
    """The entry of the committed step that ended it, or -1."""
    kept: int = 0
    """Tokens of that entry up to the one that ended it."""
    token: int = 0
    """That token if it is negative, which is an error."""


SHAPED = {
    Added, AddedRemote, GrammarSet, Aborted, HandoffWentOn, ImageWentOn, TiersAnswered,
}  # fmt: skip
"""Inputs that are on a tape in another form."""
Detail = CommitDetails | Ended


def decoder() -> msgspec.msgpack.Decoder[Input]:
    """Return a decoder of the inputs on a tape, also of those that parts declare elsewhere."""
    return msgspec.msgpack.Decoder(Union[tuple(kind for kind in leaves_of(Input) if kind not in SHAPED)])  # noqa: UP007


def leaves_of(base: type[Input]) -> Iterator[type[Input]]:
    """Yield the subclasses that have none themselves."""
    for kind in (found := base.__subclasses__()):
        yield from leaves_of(kind)
    if not found:
        yield base
