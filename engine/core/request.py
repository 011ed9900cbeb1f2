"""One sequence inside the scheduler."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

from engine.wire.block_hash import block_hash, root_hash
from engine.wire.messages import GenerateRequest, RequestTimes, TokenLogprob
from engine.wire.remote_prefill import RemotePrefillRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.timeline import TimelineEvent


class Grammar(Protocol):
    """What holds an output to a form (engine/text/grammar.py). The scheduler only asks.

    is_done: the output is complete, and nothing but the end may follow. error: why no token is allowed any more.
    """

    is_done: bool
    error: str | None

    def ready(self) -> bool:
        """Whether `mask` would return at once."""

    def mask(self) -> bytes:
        """One bit per token of the vocabulary, lowest first, in whole 32-bit words: which may come next."""

    def accept(self, token: int) -> None:
        """The output goes on with this token."""


class State(Enum):
    WAITING_FOR_GRAMMAR = "waiting for grammar"  # its grammar is on the way
    WAITING = "waiting"
    WAITING_FOR_REMOTE_KV = "waiting for remote KV"  # its KV comes from another engine
    RUNNING = "running"
    LEASED = "leased"  # was computed for another engine, which may still read the blocks
    FINISHED = "finished"


@dataclass(slots=True, eq=False)  # compared by identity
class Request:
    """Mutable; owned by one scheduler.

    tokens: prompt, then every output token that is known.
    computed: tokens whose KV exists once all planned steps have run. With overlap a step is planned
        before the one ahead of it has ended, so this runs ahead of the model by at most one step.
    in_flight: output tokens that planned steps will bring, not known yet.
    blocks: KV block ids in token order. A waiting request has some if its KV has come from another engine.
    num_cached_blocks: leading blocks that are in the prefix cache.
    slot: row of the runner's per-sequence state; -1 unless running.
    order: (priority, number of arrival); requests are served in this order, smallest first.
    grammar: of a structured output, once it is compiled.
    timeline: what has happened to it since its last delta.
    *_at: seconds on the caller's clock.

    prefill: where the client wants its prompt computed, as in GenerateRequest.
    handoff_id, num_remote_attempts: newest handoff of its prompt, and how many there were; local_prefill_only: no more.
    prefill_request: what it is computed for, if that is another engine.
    """

    request_id: str
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    max_tokens: int
    seed: int
    order: tuple[int, int]
    arrived_at: float
    cache_salt: str = ""
    reply_to: str = ""
    state: State = State.WAITING
    computed: int = 0
    in_flight: int = 0
    blocks: list[int] = field(default_factory=list)
    num_cached_blocks: int = 0
    slot: int = -1
    block_hashes: list[bytes] = field(default_factory=list)
    num_cached: int = 0
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    grammar: Grammar | None = None
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    handoff_at: tuple[float, float] | None = None  # its start, and its end if that was
    deadline_at: float | None = None
    timeline: list[TimelineEvent] = field(default_factory=list)
    prefill: Literal["auto", "local", "remote"] = "auto"
    handoff_id: str = ""
    num_remote_attempts: int = 0
    local_prefill_only: bool = False
    prefill_request: RemotePrefillRequest | None = None

    @classmethod
    def create(cls, message: GenerateRequest, order: tuple[int, int], max_model_len: int, now: float) -> Request:
        params = message.params
        num_prompt = len(message.prompt) if message.num_prompt is None else message.num_prompt
        room = max_model_len - num_prompt
        return cls(
            request_id=message.request_id,
            tokens=list(message.prompt),
            num_prompt=num_prompt,
            params=params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            seed=seed_of(message.request_id) if params.seed is None else params.seed % 2**64,
            order=order,
            arrived_at=now,
            cache_salt=message.cache_salt,
            reply_to=message.reply_to,
            prefill=message.prefill,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            deadline_at=None if message.timeout_s is None else now + message.timeout_s,
        )

    @classmethod
    def for_remote_prefill(cls, prefill_request: RemotePrefillRequest, order: tuple[int, int], now: float) -> Request:
        """A prompt of another engine: one token is sampled, whatever it is."""
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
        )

    @property
    def pending(self) -> int:
        """Tokens left to compute. Prefill, a prompt chunk, a cache hit, decode and
        a request whose KV arrived from another pool are all this one subtraction."""
        if self.num_output + self.in_flight >= self.max_tokens:
            return 0  # its last token is on the way
        return len(self.tokens) + self.in_flight - self.computed

    @property
    def queued_tokens(self) -> int:
        """Of `pending`, those before the one whose step samples the next token."""
        return max(0, self.pending - 1)

    @property
    def waiting_for_grammar(self) -> bool:
        """It cannot be planned yet: what may come next depends on a token in flight, or is still being worked out."""
        return self.grammar is not None and (self.in_flight > 0 or not self.grammar.ready())

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    def note(self, what: str) -> None:
        """Add to its timeline."""
        self.timeline.append(TimelineEvent.now(what))

    def take_timeline(self) -> list[TimelineEvent]:
        """Return what has happened since the last call."""
        timeline, self.timeline = self.timeline, []
        return timeline

    def times(self, now: float) -> RequestTimes | None:
        """Since arrival; None for a request that never ran. Without a first token, `now` stands for it."""
        if self.scheduled_at is None:
            return None
        first = now if self.first_token_at is None else self.first_token_at
        handoff = self.handoff_at and (self.handoff_at[0] - self.arrived_at, self.handoff_at[1] - self.arrived_at)
        times = (self.scheduled_at - self.arrived_at, first - self.arrived_at, now - self.arrived_at)
        return RequestTimes(*times, handoff)

    def hashes(self, count: int, block_size: int) -> list[bytes]:
        """Chained hashes of the first `count` full blocks of known tokens."""
        while len(self.block_hashes) < count:
            start = len(self.block_hashes) * block_size
            parent = self.block_hashes[-1] if start else root_hash((self.cache_salt,))
            self.block_hashes.append(block_hash(parent, self.tokens[start : start + block_size]))
        return self.block_hashes[:count]

    def last_hash(self, block_size: int) -> bytes:
        """Name of the last block of known tokens, full or not; it stands for all tokens."""
        full, rest = divmod(len(self.tokens), block_size)
        parent = self.hashes(full, block_size)[-1] if full else root_hash((self.cache_salt,))
        return block_hash(parent, self.tokens[-rest:]) if rest else parent


def seed_of(request_id: str) -> int:
    """64-bit seed for a request that brought none; equal wherever the request is run again."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")
