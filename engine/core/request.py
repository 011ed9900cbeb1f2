"""One sequence in the scheduler."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple

from engine.spec_decode.draft_length import SequenceDrafts
from engine.text.free_text import FREE_TEXT, FreeText
from engine.wire.block_hash import block_hash, root_hash, with_images
from engine.wire.messages import GenerateRequest, RequestTimes, TokenLogprob
from engine.wire.multimodal import MultiModalFeatureSpec
from engine.wire.pooling_params import PoolingParams
from engine.wire.remote_request import RemoteRequest
from engine.wire.sampling_params import SamplingParams, seed_of
from engine.wire.timeline import TimelineEvent

if TYPE_CHECKING:
    from engine.text.grammar import Grammar


class State(Enum):
    WAITING_FOR_GRAMMAR = "waiting for grammar"
    WAITING = "waiting"
    WAITING_FOR_REMOTE_KV = "waiting for remote KV"
    RUNNING = "running"
    LEASED = "leased"  # computed for another engine, which may still read the blocks
    FINISHED = "finished"


@dataclass(slots=True)
class BlockTable:
    """What one request holds of one KV cache group."""

    blocks: list[int]
    """Block ids in token order. The first `num_released` are no longer its own."""
    num_cached: int = 0
    """Leading blocks that are in the prefix cache, or have been before they were given back."""
    num_released: int = 0
    """Leading blocks that no token to come sees, so that they were given back or never taken."""
    keeps_all: bool = True
    """Nothing is given back before the request ends."""
    next_full: int = 0
    """Computed tokens, at least, with which a further block may enter the prefix cache."""

    @property
    def held(self) -> list[int]:
        return self.blocks[self.num_released :] if self.num_released else self.blocks

    def place(self, block: int) -> int:
        """Return the index of a block that it holds."""
        return self.blocks.index(block, self.num_released)


NEVER = 1 << 62  # a position


class StateSnapshot(NamedTuple):
    """A kept copy of a sequence's recurrent state, from before the token at `position`."""

    position: int
    snapshot: int


@dataclass(slots=True)
class RequestStates:
    """What one request has to do with snapshots of recurrent states."""

    source: StateSnapshot | None = None
    """That from which it starts, until it does."""
    saves: deque[StateSnapshot] = field(default_factory=deque)
    """Those that planned steps write, or another engine hands over, oldest first."""
    handed_over: list[list[int]] = field(default_factory=list)
    """What is handed over in addition to KV blocks, as one more KV cache group; empty in a model without
    states."""
    wanted: list[int] = field(default_factory=list)
    """Borders to come of its known tokens where its state is kept, ascending."""
    last_wanted: int = 0
    """The last of these that it has passed."""
    next_save: int = NEVER
    """The next position at which a snapshot is made."""
    newest: bytes = b""
    """Hash of the snapshot that the next one takes the place of."""

    @property
    def held(self) -> list[int]:
        """Snapshots, once for each use of them."""
        sources = [] if self.source is None else [self.source.snapshot]
        return [*sources, *(save.snapshot for save in self.saves), *(s for group in self.handed_over for s in group)]


@dataclass(slots=True)
class PrefixUse:
    """What one request has to do with the prefix cache."""

    salt: str = ""
    """Only requests of the same salt share blocks."""
    skip_reading: bool = False
    """All tokens are computed, since something is wanted of each."""
    hashes: list[bytes] = field(default_factory=list)
    """Of its leading full blocks, as far as they were needed."""
    num_cached: int = 0
    """Prompt tokens that came from the cache."""


@dataclass(slots=True)
class RemotePrompt:
    """One request's prompt, as far as other engines may compute it."""

    where: Literal["auto", "local", "remote"] = "auto"
    """The place at which the client wants the prompt computed, as in GenerateRequest."""
    handoff_id: str = ""
    """Its newest handoff."""
    num_attempts: int = 0
    local_only: bool = False
    """A handoff failed in a way that another attempt cannot mend."""
    handoff_at: tuple[float, float] | None = None
    """Start and end of its newest handoff."""


@dataclass(slots=True)
class RequestClock:
    """When one request reached what (`*_at`): seconds on the caller's clock."""

    arrived_at: float
    deadline_at: float | None = None
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None


@dataclass(slots=True, eq=False)  # compared by identity
class Request:
    """One sequence; mutable, and owned by one scheduler. What only one feature needs is in that feature's record."""

    request_id: str
    tokens: list[int]
    """Prompt, then every output token that is known."""
    num_prompt: int
    params: SamplingParams
    max_tokens: int
    seed: int
    order: tuple[int, int]
    """(priority, number of arrival); the smallest is served first."""
    clock: RequestClock
    reply_to: str = ""
    state: State = State.WAITING
    computed: int = 0
    """Tokens whose KV exists once all planned steps have run. With overlap a step is planned before the one ahead of it
    has ended, so this is ahead of the model by at most one step."""
    in_flight: int = 0
    """Output tokens that planned steps will sample, not known yet."""
    tables: list[BlockTable] = field(default_factory=list)
    """Its KV blocks, a table for each KV cache group; empty if it holds none. A waiting request has some if its KV came
    from another engine."""
    states: RequestStates = field(default_factory=RequestStates)
    capacity: int = 0
    """Leading tokens for which it holds blocks in all groups."""
    slot: int = -1
    """Row of the runner's per-sequence state; -1 unless running."""
    num_preemptions: int = 0
    timeline: list[TimelineEvent] = field(default_factory=list)
    """Events since its last delta."""
    prefix: PrefixUse = field(default_factory=PrefixUse)
    remote: RemotePrompt = field(default_factory=RemotePrompt)
    asked_by: RemoteRequest | None = None
    """The request of another engine that the prompt is computed for, if it is."""
    images: list[MultiModalFeatureSpec] = field(default_factory=list)
    pooling: PoolingParams | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    grammar: Grammar | FreeText = FREE_TEXT
    """Grammar of a structured output, once it is compiled."""
    drafts: SequenceDrafts = field(default_factory=SequenceDrafts)

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
            clock=RequestClock(now, None if message.timeout_s is None else now + message.timeout_s),
            reply_to=message.reply_to,
            prefix=PrefixUse(message.cache_salt, skip_reading=params.prompt_logprobs is not None),
            remote=RemotePrompt(message.prefill),
            images=message.mm_features,
            pooling=message.pooling,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            drafts=SequenceDrafts(message.prediction),
        )

    @classmethod
    def for_other_engine(cls, asked_by: RemoteRequest, order: tuple[int, int], now: float) -> Request:
        """Create a request for a prompt of another engine. One token is sampled, of any value."""
        return cls(
            request_id=asked_by.handoff_id,
            tokens=list(asked_by.token_ids),
            num_prompt=asked_by.num_prompt,
            params=asked_by.params,
            max_tokens=len(asked_by.token_ids) - asked_by.num_prompt + 1,
            seed=asked_by.seed,
            order=order,
            clock=RequestClock(now, None if asked_by.timeout_s is None else now + asked_by.timeout_s),
            prefix=PrefixUse(asked_by.cache_salt),
            asked_by=asked_by,
            images=asked_by.mm_features,
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
    def is_undecided(self) -> bool:
        """Whether what comes next is not known yet, so that no step can be planned: how many tokens the step in flight
        will yield, or which ones its grammar allows."""
        return self.drafts.in_flight > 0 or self.grammar.waits(self.in_flight)

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
        """Return times since arrival; None if it never ran. `now` is used for a first token that never came."""
        clock, handoff = self.clock, self.remote.handoff_at
        if clock.scheduled_at is None:
            return None
        first, start = now if clock.first_token_at is None else clock.first_token_at, clock.arrived_at
        return RequestTimes(
            scheduled_s=clock.scheduled_at - start,
            first_token_s=first - start,
            finished_s=now - start,
            handoff_s=handoff and (handoff[0] - start, handoff[1] - start),
        )

    def add_prompt_logprobs(self, start: int, rows: list[TokenLogprob]) -> None:
        """Record the log-probabilities of the prompt tokens from `start` + 1 on."""
        known = self.prompt_logprobs
        if known is not None and len(known) >= start + 1:  # fewer only if computed again after preemption
            known.extend(rows[len(known) - start - 1 :])

    def hashes(self, count: int, block_size: int) -> list[bytes]:
        """Return chained hashes of the first `count` full blocks of known tokens."""
        hashes = self.prefix.hashes
        while len(hashes) < count:
            start = len(hashes) * block_size
            parent = hashes[-1] if start else root_hash((self.prefix.salt,))
            if self.images:
                parent = with_images(parent, self.images, start, start + block_size)
            hashes.append(block_hash(parent, self.tokens[start : start + block_size]))
        return hashes[:count]

    def last_hash(self, block_size: int) -> bytes:
        """Return the hash of the last block of known tokens, full or not; it identifies all tokens."""
        full, rest = divmod(len(self.tokens), block_size)
        parent = self.hashes(full, block_size)[-1] if full else root_hash((self.prefix.salt,))
        if not rest:
            return parent
        parent = with_images(parent, self.images, len(self.tokens) - rest, len(self.tokens))
        return block_hash(parent, self.tokens[-rest:])
