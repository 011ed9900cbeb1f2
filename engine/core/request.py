"""One sequence in the scheduler."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal

from engine.wire.block_hash import block_hash, root_hash, with_images
from engine.wire.messages import GenerateRequest, RequestTimes, TokenLogprob
from engine.wire.multimodal import MultiModalFeatureSpec
from engine.wire.pooling_params import PoolingParams
from engine.wire.remote_prefill import RemotePrefillRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.timeline import TimelineEvent

if TYPE_CHECKING:
    from engine.spec_decode.draft_length import SequenceDrafts
    from engine.text.grammar import Grammar


class State(Enum):
    WAITING_FOR_GRAMMAR = "waiting for grammar"
    WAITING = "waiting"
    WAITING_FOR_REMOTE_KV = "waiting for remote KV"
    RUNNING = "running"
    LEASED = "leased"  # computed for another engine, which may still read the blocks
    FINISHED = "finished"


@dataclass(slots=True, eq=False)  # compared by identity
class Request:
    """One sequence; mutable, and owned by one scheduler. Times (`*_at`) are seconds on the caller's clock."""

    request_id: str
    tokens: list[int]
    """Prompt, then every output token that is known."""
    num_prompt: int
    params: SamplingParams
    max_tokens: int
    seed: int
    order: tuple[int, int]
    """(priority, number of arrival); the smallest is served first."""
    arrived_at: float
    pooling: PoolingParams | None = None
    images: list[MultiModalFeatureSpec] = field(default_factory=list)
    cache_salt: str = ""
    reply_to: str = ""
    state: State = State.WAITING
    computed: int = 0
    """Tokens whose KV exists once all planned steps have run. With overlap a step is planned before the one ahead of it
    has ended, so this is ahead of the model by at most one step."""
    in_flight: int = 0
    """Output tokens that planned steps will sample, not known yet."""
    blocks: list[int] = field(default_factory=list)
    """KV block ids in token order. A waiting request has some if its KV came from another engine."""
    num_cached_blocks: int = 0
    """Leading blocks that are in the prefix cache."""
    slot: int = -1
    """Row of the runner's per-sequence state; -1 unless running."""
    block_hashes: list[bytes] = field(default_factory=list)
    num_cached: int = 0
    """Prompt tokens that came from the prefix cache."""
    skip_reading_prefix_cache: bool = False
    """All tokens are computed, since something is wanted of each."""
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    grammar: Grammar | None = None
    """Grammar of a structured output, once it is compiled."""
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    handoff_at: tuple[float, float] | None = None
    """Start and end of the newest handoff of its prompt."""
    deadline_at: float | None = None
    timeline: list[TimelineEvent] = field(default_factory=list)
    """Events since its last delta."""
    prefill: Literal["auto", "local", "remote"] = "auto"
    """The place at which the client wants the prompt computed, as in GenerateRequest."""
    handoff_id: str = ""
    """Newest handoff of its prompt to another engine."""
    num_remote_attempts: int = 0
    local_prefill_only: bool = False
    """A handoff failed in a way that another attempt cannot mend."""
    prefill_request: RemotePrefillRequest | None = None
    """Set if the prompt is computed for another engine."""
    prediction: list[int] = field(default_factory=list)
    drafts: SequenceDrafts | None = None
    """Its speculative decoding, if the engine does any."""

    @classmethod
    def create(cls, message: GenerateRequest, order: tuple[int, int], max_model_len: int, now: float) -> Request:
        params = message.params
        num_prompt = len(message.prompt) if message.num_prompt is None else message.num_prompt
        limit = max_model_len - num_prompt if message.pooling is None else 1  # pooling counts as one token in flight
        return cls(
            request_id=message.request_id,
            tokens=list(message.prompt),
            num_prompt=num_prompt,
            params=params,
            max_tokens=limit if params.max_tokens is None else min(params.max_tokens, limit),
            seed=seed_of(message.request_id) if params.seed is None else params.seed % 2**64,
            order=order,
            arrived_at=now,
            pooling=message.pooling,
            images=message.mm_features,
            cache_salt=message.cache_salt,
            reply_to=message.reply_to,
            skip_reading_prefix_cache=params.prompt_logprobs is not None,
            prefill=message.prefill,
            prediction=message.prediction,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            deadline_at=None if message.timeout_s is None else now + message.timeout_s,
        )

    @classmethod
    def for_remote_prefill(cls, prefill_request: RemotePrefillRequest, order: tuple[int, int], now: float) -> Request:
        """Create a request for a prompt of another engine. One token is sampled, whatever it is."""
        return cls(
            request_id=prefill_request.handoff_id,
            tokens=list(prefill_request.token_ids),
            num_prompt=prefill_request.num_prompt,
            params=prefill_request.params,
            max_tokens=len(prefill_request.token_ids) - prefill_request.num_prompt + 1,
            seed=prefill_request.seed,
            order=order,
            arrived_at=now,
            cache_salt=prefill_request.cache_salt,
            deadline_at=None if prefill_request.timeout_s is None else now + prefill_request.timeout_s,
            prefill_request=prefill_request,
            images=prefill_request.mm_features,
        )

    @property
    def pending(self) -> int:
        """Tokens left to compute. Prefill, a prompt chunk, a cache hit, decode and
        a request whose KV arrived from another pool are all this one subtraction."""
        coming = len(self.tokens) + self.in_flight
        return 0 if coming - self.num_prompt >= self.max_tokens else coming - self.computed  # 0: its last is on the way

    @property
    def queued_tokens(self) -> int:
        """Pending tokens before the one whose step samples the next token."""
        return max(0, self.pending - 1)

    @property
    def waiting_for_grammar(self) -> bool:
        """The next mask depends on a token in flight, or is still being computed, so no step can be planned."""
        return self.grammar is not None and (self.in_flight > 0 or not self.grammar.ready())

    @property
    def verifying(self) -> bool:
        """How many tokens the step in flight will yield is not known, so no other step can be planned."""
        return self.drafts is not None and self.drafts.in_flight > 0

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    def note(self, what: str) -> None:
        """Add an event to the timeline."""
        self.timeline.append(TimelineEvent.now(what))

    def take_timeline(self) -> list[TimelineEvent]:
        """Return the events since the last call."""
        timeline, self.timeline = self.timeline, []
        return timeline

    def times(self, now: float) -> RequestTimes | None:
        """Return times since arrival; None if it never ran. `now` stands in for a first token that never came."""
        if self.scheduled_at is None:
            return None
        first = now if self.first_token_at is None else self.first_token_at
        handoff = self.handoff_at and (self.handoff_at[0] - self.arrived_at, self.handoff_at[1] - self.arrived_at)
        times = (self.scheduled_at - self.arrived_at, first - self.arrived_at, now - self.arrived_at)
        return RequestTimes(*times, handoff)

    def hashes(self, count: int, block_size: int) -> list[bytes]:
        """Return chained hashes of the first `count` full blocks of known tokens."""
        while len(self.block_hashes) < count:
            start = len(self.block_hashes) * block_size
            parent = self.block_hashes[-1] if start else root_hash((self.cache_salt,))
            if self.images:
                parent = with_images(parent, self.images, start, start + block_size)
            self.block_hashes.append(block_hash(parent, self.tokens[start : start + block_size]))
        return self.block_hashes[:count]

    def last_hash(self, block_size: int) -> bytes:
        """Return the hash of the last block of known tokens, full or not; it identifies all tokens."""
        full, rest = divmod(len(self.tokens), block_size)
        parent = self.hashes(full, block_size)[-1] if full else root_hash((self.cache_salt,))
        if not rest:
            return parent
        parent = with_images(parent, self.images, len(self.tokens) - rest, len(self.tokens))
        return block_hash(parent, self.tokens[-rest:])


def seed_of(request_id: str) -> int:
    """Return a 64-bit seed for a request that brought none; equal wherever the request is run again."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")
