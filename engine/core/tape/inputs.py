"""What enters a scheduler besides steps, without text. Each record can be given to a scheduler again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from operator import attrgetter
from typing import ClassVar

import msgspec

from engine.core.features.images.encoder_cache_manager import EncoderCacheManager
from engine.core.features.images.image_handoffs import ImageHandoffs
from engine.core.scheduler import Scheduler
from engine.core.tape.answers import ORDINARY, Answers, ReplayedChannel, ReplayedGrammar
from engine.core.tape.object_graph import MAX_ZEROS
from engine.errors import EngineError
from engine.wire.block_hash import BLOCK_HASH_BYTES
from engine.wire.generate_request import GenerateRequest
from engine.wire.handoff import BlocksAsked, Failed, FirstToken, HandoffEvent, Received
from engine.wire.handoff import Closed as ClosedEvent
from engine.wire.kv_offload import FoundBlock, SavedHold, StoreListing, TierAnswer
from engine.wire.lora import LoRARequest
from engine.wire.messages import PrefillReplica
from engine.wire.multimodal import MultiModalFeatureSpec, PlaceholderRange
from engine.wire.pooling_params import PoolingParams
from engine.wire.remote_request import RemoteRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.stats.handoff_stats import Role
from engine.wire.structured_outputs import StructuredOutputsParams
from engine.wire.token_delta import FinishReason

SOME_FORM = StructuredOutputsParams(regex=".*")


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


def lora_without_path(lora: LoRARequest | None) -> LoRARequest | None:
    return None if lora is None else LoRARequest(lora.lora_name, 0, "", lora.digest)


def remote_without_text(request: RemoteRequest, params: SamplingParams) -> RemoteRequest:
    return msgspec.structs.replace(
        request, token_ids=[], params=params, cache_salt="", mm_features=[], lora=lora_without_path(request.lora)
    )


class Input(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A record on the tape. Subclasses have the arguments of the call."""

    def apply(self, scheduler: Scheduler, answers: Answers) -> None:
        """Make the call."""
        raise NotImplementedError


class Call(Input, frozen=True):
    """A call whose arguments are the fields."""

    method: ClassVar[str]
    """Where the scheduler has it."""

    def apply(self, scheduler: Scheduler, answers: Answers) -> None:
        attrgetter(self.method)(scheduler)(*msgspec.structs.astuple(self))


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
        assert isinstance(scheduler.images, EncoderCacheManager)
        for span, count in zip(self.spans, self.num_embeds, strict=True):
            tokens[span.offset : span.offset + count] = [scheduler.images.image_token_id] * count
        return tokens

    def images(self, answers: Answers) -> list[MultiModalFeatureSpec]:
        found = zip(answers.hashes[self.order], self.spans, self.num_embeds, strict=True)
        return [
            MultiModalFeatureSpec(data={}, mm_hash=mm_hash, mm_position=span, num_embeds=count)
            for mm_hash, span, count in found
        ]


class Added(Input, frozen=True):
    at: float
    num_tokens: int
    message: GenerateRequest
    """Without tokens and images."""
    images: ImageShapes | None = None

    @classmethod
    def of(cls, message: GenerateRequest, now: float, vocab_size: int, order: int) -> Added:
        """order: as in ImageShapes."""
        images = ImageShapes.of(message.mm_features, order)
        return cls(now, len(message.prompt), images=images, message=GenerateRequest(
            request_id=message.request_id,
            prompt=[],
            lora=lora_without_path(message.lora),
            params=params_without_text(message.params, vocab_size),
            pooling=message.pooling and PoolingParams(task=message.pooling.task),
            client=message.client,
            timeout_s=message.timeout_s,
            priority=message.priority,
            prediction=[ORDINARY] if message.prediction else [],
            kv_source=message.kv_source,
            kv_holder=message.kv_holder,
            prefill=message.prefill,
            num_prompt=message.num_prompt,
            hold=message.hold,
        ))  # fmt: skip

    def apply(self, scheduler: Scheduler, answers: Answers) -> None:
        message = msgspec.structs.replace(self.message, prompt=ordinary(self.num_tokens))
        if self.images is not None:
            prompt, images = self.images.prompt(self.num_tokens, scheduler), self.images.images(answers)
            message = msgspec.structs.replace(message, prompt=prompt, mm_features=images)
        scheduler.add(message, self.at)


class AddedRemote(Input, frozen=True):
    at: float
    num_tokens: int
    request: RemoteRequest
    """Without tokens and images."""
    images: ImageShapes | None = None

    @classmethod
    def of(cls, asked_by: RemoteRequest, now: float, vocab_size: int, order: int) -> AddedRemote:
        """order: as in ImageShapes."""
        shape = remote_without_text(asked_by, params_without_text(asked_by.params, vocab_size))
        return cls(now, len(asked_by.token_ids), shape, ImageShapes.of(asked_by.mm_features, order))

    def apply(self, scheduler: Scheduler, answers: Answers) -> None:
        request = msgspec.structs.replace(self.request, token_ids=ordinary(self.num_tokens))
        if self.images is not None:
            tokens, images = self.images.prompt(self.num_tokens, scheduler), self.images.images(answers)
            request = msgspec.structs.replace(request, token_ids=tokens, mm_features=images)
        scheduler.add_remote(request, self.at)


class GrammarSet(Input, frozen=True):
    request_id: str

    def apply(self, scheduler: Scheduler, answers: Answers) -> None:
        scheduler.set_grammar(scheduler.queue.live[self.request_id], ReplayedGrammar(answers))  # type: ignore[arg-type]


class Aborted(Input, frozen=True):
    at: float
    request_id: str
    reason: FinishReason
    failed: bool
    """Whether the request ended with an error."""

    def apply(self, scheduler: Scheduler, answers: Answers) -> None:
        error = EngineError(self.request_id, "as it was recorded") if self.failed else None
        scheduler.abort(self.request_id, self.at, error, reason=self.reason)


class MovesAsked(Call, frozen=True):
    method = "move"
    count: int
    at: float


class KVReceived(Input, frozen=True):
    at: float
    handoff_id: str
    cached: int
    token: int
    """The first token: ORDINARY, the one that stands for the end, or a negative one, which is an error."""

    def apply(self, scheduler: Scheduler, answers: Answers) -> None:
        scheduler.handle(Received(self.handoff_id, FirstToken(self.token, None, b"", self.cached)), self.at)


class HandoffFailed(Input, frozen=True):
    at: float
    handoff_id: str
    reason: str
    verified: int
    retry: bool

    def apply(self, scheduler: Scheduler, answers: Answers) -> None:
        scheduler.handle(Failed(self.handoff_id, self.reason, self.verified, self.retry), self.at)


class HandoffClosed(Input, frozen=True):
    at: float
    handoff_id: str
    reason: str

    def apply(self, scheduler: Scheduler, answers: Answers) -> None:
        scheduler.handle(ClosedEvent(self.handoff_id, self.reason), self.at)


class ImageEnded(Input, frozen=True):
    """An encode engine has sent an image, or has not."""

    handoff: str
    """Id of the handoff without the hash of the image (`number_of`)."""
    failed: str | None
    """Why it has failed; None if it has not."""

    def apply(self, scheduler: Scheduler, answers: Answers) -> None:
        handoffs = scheduler.images.handoffs
        assert isinstance(handoffs, ImageHandoffs) and isinstance(handoffs.channel, ReplayedChannel)
        handoff_id = handoffs.id_of(self.handoff)
        if self.failed is None:
            handoffs.channel.waiting.append(Received(handoff_id, FirstToken(ORDINARY, None, b"", 0)))
        else:
            handoffs.channel.waiting.append(Failed(handoff_id, self.failed, 0, retry=False))
        handoffs.take_events()


class EncodersSet(Call, frozen=True):
    method = "images.handoffs.set_replicas"
    replicas: list[PrefillReplica]


class BlocksWanted(Input, frozen=True):
    """Another engine asks for blocks by their hashes, which are on the tape under a number of arrival that no request
    has."""

    at: float
    order: int
    groups: list[int]
    """Hashes of each KV cache group."""
    upto: int
    request: RemoteRequest
    """Without tokens."""

    def apply(self, scheduler: Scheduler, answers: Answers) -> None:
        hashes = iter(answers.hashes.get(self.order, ()))
        names = [b"".join(islice(hashes, count)) for count in self.groups]
        scheduler.handle(BlocksAsked(self.request, self.upto, names), self.at)


def handoff_input(event: HandoffEvent, token: int, now: float, order: int) -> Input | None:
    """Return the record of a handoff's progress; None for events that no decision depends on. token: as in
    KVReceived. order: as in BlocksWanted."""
    match event:
        case BlocksAsked(request, upto, names):
            shape = remote_without_text(request, SamplingParams())
            return BlocksWanted(now, order, [len(some) // BLOCK_HASH_BYTES for some in names], upto, shape)
        case Received(handoff_id, first):
            return KVReceived(now, handoff_id, first.cached, token)
        case Failed(handoff_id, reason, verified, retry):
            return HandoffFailed(now, handoff_id, reason, verified, retry)
        case ClosedEvent(handoff_id, reason):
            return HandoffClosed(now, handoff_id, reason)
        case _:
            return None


class CacheCleared(Call, frozen=True):
    method = "clear_cache"


class ReplicasSet(Call, frozen=True):
    method = "handoffs.set_prefill_replicas"
    replicas: list[PrefillReplica]


class RoleSet(Call, frozen=True):
    method = "handoffs.switch"
    role: Role


class StuckAsked(Input, frozen=True):
    at: float

    def apply(self, scheduler: Scheduler, answers: Answers) -> None:
        scheduler.handoffs.stuck(scheduler.queue, self.at)


class HoldsReleased(Call, frozen=True):
    method = "holds.release"
    name: str
    client: str | None


class HoldsGiven(Call, frozen=True):
    method = "holds.give"
    limit: int
    at: float


class AdapterNumbered(Call, frozen=True):
    method = "adapters.new_load"
    lora: LoRARequest


class AdapterRead(Call, frozen=True):
    method = "adapters.loaded"
    number: int
    failed: bool


class TiersAnswered(Call, frozen=True):
    method = "loading.answered"
    answers: list[TierAnswer]
    at: float


class SavedShape(msgspec.Struct, frozen=True, array_like=True):
    """A hold in the store."""

    hold: SavedHold
    """Without hashes."""
    num_hashes: int
    needed: list[int]
    """Hashes of each KV cache group."""


class StoreListed(Input, frozen=True):
    """What other engines have done to the store. All names and hashes are on the tape under a number of arrival that no
    request has."""

    at: float
    order: int
    added: list[tuple[int, float]]
    """Size and age of each block."""
    num_removed: int
    num_dropped_holds: int
    holds: list[SavedShape]

    @classmethod
    def of(cls, listing: StoreListing, now: float, order: int) -> StoreListed:
        holds = [
            SavedShape(msgspec.structs.replace(hold, hashes=[], needed=[]), len(hold.hashes), [*map(len, hold.needed)])
            for _, hold in listing.holds
        ]
        added = [(block.size, block.age_s) for block in listing.added]
        return cls(now, order, added, len(listing.removed), len(listing.dropped_holds), holds)

    @staticmethod
    def names_of(listing: StoreListing) -> list[bytes]:
        names = [*(block.name for block in listing.added), *listing.removed, *listing.dropped_holds]
        for name, hold in listing.holds:
            names += [name, *hold.hashes, *(each for some in hold.needed for each in some)]
        return names

    def apply(self, scheduler: Scheduler, answers: Answers) -> None:
        names = iter(answers.hashes.get(self.order, ()))

        def take(count: int) -> list[bytes]:
            return list(islice(names, count))

        added = [FoundBlock(next(names), size, age_s) for size, age_s in self.added]
        removed, dropped = take(self.num_removed), take(self.num_dropped_holds)
        holds = [
            (
                next(names),
                msgspec.structs.replace(each.hold, hashes=take(each.num_hashes), needed=[*map(take, each.needed)]),
            )
            for each in self.holds
        ]
        scheduler.loading.answered([StoreListing(added, removed, holds, dropped)], self.at)


class CommandsTaken(Call, frozen=True):
    """The tiers' commands were taken. It comes several times in each step, so it has a form of its own on the tape."""

    method = "offloading.take_commands"
    at: float


class FetchesUpdated(Call, frozen=True):
    method = "fetching.update"
    at: float


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


Record = (
    Added | AddedRemote | GrammarSet | Aborted | MovesAsked | KVReceived | HandoffFailed | HandoffClosed | BlocksWanted
    | ImageEnded | EncodersSet | CacheCleared | ReplicasSet | RoleSet | StuckAsked | HoldsReleased | HoldsGiven
    | AdapterNumbered | AdapterRead | TiersAnswered | StoreListed | FetchesUpdated | CommitDetails | Ended
)  # fmt: skip
