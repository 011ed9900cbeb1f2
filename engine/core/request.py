"""One sequence in the scheduler."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from engine.wire.block_hash import Place, block_hash, root_hash, with_places
from engine.wire.generate_request import GenerateRequest
from engine.wire.part_record import Attached, PartRecord
from engine.wire.sampling_params import SamplingParams, seed_of
from engine.wire.timeline import TimelineEvent
from engine.wire.token_delta import RequestTimes, TokenLogprob

if TYPE_CHECKING:
    from engine.core.constraint import Constraint


class State(Enum):
    WAITING = "waiting"
    WAITING_FOR_REMOTE_KV = "waiting for remote KV"
    LOADING_KV = "loading KV"  # from a tier or another cache; it holds no blocks meanwhile
    RUNNING = "running"
    LEASED = "leased"  # computed for another engine, which may still read the blocks
    FINISHED = "finished"


@dataclass(slots=True)
class BlockTable:
    """Blocks that one request holds in one KV cache group."""

    blocks: list[int]
    """Block ids in token order. The request has released the first `num_released`."""
    num_cached: int = 0
    """Leading blocks that are in the prefix cache, or were when they were released."""
    num_released: int = 0
    """Leading blocks that were released or never taken, since no future token attends to them."""
    keeps_all: bool = True
    """Whether all blocks are kept until the request ends."""
    next_full: int = 0
    """Number of computed tokens from which the next block can enter the prefix cache."""

    @property
    def held(self) -> list[int]:
        return self.blocks[self.num_released :] if self.num_released else self.blocks

    def place(self, block: int) -> int:
        """Return the index of a block that the request holds."""
        return self.blocks.index(block, self.num_released)


@dataclass(slots=True)
class PrefixUse:
    """Prefix cache state of one request."""

    salt: str = ""
    """Salt of the hashes: only requests with the same salt share blocks."""
    extra_keys: tuple[str, ...] = ()
    """What parts add to the hashes: what determines the KV besides the tokens and their places."""
    places: list[Place] = field(default_factory=list)
    """Places of the prompt whose names are part of the hashes too, in order of position."""
    skip_reading: bool = False
    """Whether the cache is ignored: the request needs an output for every token, so all are computed."""
    hashes: list[bytes] = field(default_factory=list)
    """Hashes of its leading full blocks, as many as were needed so far."""
    num_cached: int = 0
    """Prompt tokens that came from the cache."""
    looked_below: bool = False
    """Whether its blocks have been looked for in the tiers below the cache."""

    @property
    def root(self) -> bytes:
        """Parent hash of the first block."""
        return root_hash(self.salt, self.extra_keys)


@dataclass(slots=True)
class RequestClock:
    """Times at which one request reached each stage, in seconds on the caller's clock."""

    arrived_at: float
    deadline_at: float = math.inf
    first_token_by: float = math.inf  #: when the client wants the first token
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    @staticmethod
    def starting(now: float, *limits_s: float | None) -> RequestClock:
        return RequestClock(now, *(math.inf if limit_s is None else now + limit_s for limit_s in limits_s))


@dataclass(slots=True, eq=False)  # compared by identity
class Request:
    """One sequence; mutable, owned by one scheduler. State needed by only one feature is in that feature's own
    record."""

    request_id: str
    tokens: list[int]
    """The prompt, followed by every known output token."""
    num_prompt: int
    params: SamplingParams
    max_tokens: int
    seed: int
    clock: RequestClock
    order: tuple[int, int] = (0, 0)
    """(priority, arrival number); the smallest is served first."""
    reply_to: str = ""
    client: str = ""
    """Client with whose other requests it shares its turns; empty if unknown."""
    state: State = State.WAITING
    computed: int = 0
    """Tokens whose KV exists once all planned steps have run. With overlap a step is planned before the previous one
    ends, so this is at most one step ahead of the model."""
    finite: int = 0
    """Leading tokens whose KV in its blocks is known to be finite, since the logits computed from it were."""
    in_flight: int = 0
    """Output tokens that planned steps will sample but that are not known yet."""
    tables: list[BlockTable] = field(default_factory=list)
    """Its KV blocks, one table per KV cache group; empty if it holds none. A waiting request holds blocks only if its
    KV came from another engine."""
    handed_over: list[list[int]] = field(default_factory=list)
    """What is handed over besides KV blocks, as further KV cache groups."""
    capacity: int = 0
    """Number of leading tokens for which it holds blocks in all groups."""
    slot: int = -1
    """Row of the runner's per-sequence state; -1 unless running."""
    num_preemptions: int = 0
    expected: int = 0
    """While it waits for blocks, how many tokens it has to compute, as the prefix cache told when it was last looked
    for; 0 until then."""
    overtaken: int = 0
    """Tokens to compute of later requests that got blocks while it waited for its own."""
    timeline: list[TimelineEvent] = field(default_factory=list)
    """Events since its last delta."""
    prefix: PrefixUse = field(default_factory=PrefixUse)
    of: dict[str, Any] = field(default_factory=dict)
    """What parts keep of it, by their names."""
    marks: list[int] = field(default_factory=list)
    """Numbers of leading tokens, ascending: parts hear as soon as so many are in the prefix cache (Part.passed)."""
    news: list[PartRecord] = field(default_factory=list)
    """What parts tell with its next delta."""
    asked_by: Any = None
    """The message of another engine for which this prompt is computed, if any. A request that moves gets one when it
    stops here."""
    attached: Attached = field(default_factory=dict)  #: what parts tell their ends on the ranks when it gets a slot
    generates: bool = True
    """Whether it is answered by tokens, and not by what a part makes of its prompt."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    constraint: Constraint | None = None
    """What its output is constrained by; None until a part knows."""
    verifying: int = 0
    """Drafts in the step that is planned but not committed."""
    leaving: int = 0
    """Number of tokens after which the request may stop, so that another engine continues it; 0 if it stays."""

    @classmethod
    def create(cls, message: GenerateRequest, max_model_len: int, now: float, generates: bool = True) -> Request:
        params = message.params if generates else SamplingParams()
        num_prompt = len(message.prompt) if message.num_prompt is None else message.num_prompt
        limit = max_model_len - num_prompt if generates else 1  # a part's answer counts as one token in flight
        return cls(
            request_id=message.request_id,
            tokens=list(message.prompt),
            num_prompt=num_prompt,
            params=params,
            max_tokens=limit if params.max_tokens is None else min(params.max_tokens, limit),
            seed=seed_of(message.request_id) if params.seed is None else params.seed % 2**64,
            clock=RequestClock.starting(now, message.timeout_s, message.ttft_slo_s),
            reply_to=message.reply_to,
            client=message.client,
            prefix=PrefixUse(message.cache_salt, skip_reading=params.prompt_logprobs is not None),
            generates=generates,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )

    def attach(self, record: PartRecord) -> None:
        """Tell a part's ends on the ranks this with the sequence, each time that it gets a slot."""
        self.attached[record.part] = record

    @property
    def pending(self) -> int:
        """Tokens left to compute. This one subtraction covers prefill, a prompt chunk, a cache hit, decode, and a
        request whose KV came from another pool."""
        coming = len(self.tokens) + self.in_flight
        return 0 if coming - self.num_prompt >= self.max_tokens else coming - self.computed  # 0: its last is in flight

    @property
    def queued_tokens(self) -> int:
        """Tokens to compute before the token from which the next one is sampled."""
        return max(0, self.pending - 1)

    @property
    def is_undecided(self) -> bool:
        """Whether no step can be planned for the request yet. Either it is unknown how many tokens the step in flight
        will yield or which tokens its constraint allows next, or the request will stop at the token in flight."""
        if self.verifying > 0 or (self.constraint is not None and self.constraint.waits(self.in_flight)):
            return True
        return self.leaving > 0 and self.in_flight > 0

    @property
    def is_waiting(self) -> bool:
        return self.state is State.WAITING

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    def note(self, what: str) -> None:
        """Add an event to the timeline."""
        self.timeline.append(TimelineEvent.now(what))

    def take_timeline(self) -> list[TimelineEvent]:
        """Return the timeline events since the last call."""
        timeline, self.timeline = self.timeline, []
        return timeline

    def take_news(self) -> list[PartRecord]:
        """Return what parts tell since the last call."""
        news, self.news = self.news, []
        return news

    def times(self, now: float) -> RequestTimes | None:
        """Return the request's times relative to its arrival, or None if it never ran. If there is no first token yet,
        `now` is its time."""
        clock = self.clock
        if clock.scheduled_at is None:
            return None
        first, start = now if clock.first_token_at is None else clock.first_token_at, clock.arrived_at
        return RequestTimes(
            scheduled_s=clock.scheduled_at - start,
            first_token_s=first - start,
            finished_s=now - start,
        )

    def add_prompt_logprobs(self, start: int, rows: list[TokenLogprob]) -> None:
        """Record the log-probabilities of the prompt tokens from `start` + 1 on."""
        known = self.prompt_logprobs
        if known is not None and len(known) >= start + 1:  # more only if tokens are computed again after preemption
            known.extend(rows[len(known) - start - 1 :])

    def hashes(self, count: int, block_size: int) -> list[bytes]:
        """Return chained hashes of the first `count` full blocks of known tokens."""
        hashes = self.prefix.hashes
        while len(hashes) < count:
            start = len(hashes) * block_size
            parent = hashes[-1] if start else self.prefix.root
            if self.prefix.places:
                parent = with_places(parent, self.prefix.places, start, start + block_size)
            hashes.append(block_hash(parent, self.tokens[start : start + block_size]))
        return hashes[:count]

    def last_hash(self, block_size: int) -> bytes:
        """Return the hash of the last block of known tokens, full or not. It identifies the whole sequence."""
        full, rest = divmod(len(self.tokens), block_size)
        parent = self.hashes(full, block_size)[-1] if full else self.prefix.root
        if not rest:
            return parent
        parent = with_places(parent, self.prefix.places, len(self.tokens) - rest, len(self.tokens))
        return block_hash(parent, self.tokens[-rest:])
