"""One sequence inside the scheduler."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from enum import Enum

from engine.messages import GenerateRequest, RequestTimes, TokenLogprob
from engine.sampling_params import SamplingParams


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)  # compared by identity
class Request:
    """Mutable; owned by one scheduler.

    tokens: prompt, then every output token that is known.
    computed: tokens whose KV exists once all planned steps have run. With overlap a step is planned
        before the one ahead of it has ended, so this runs ahead of the model by at most one step.
    in_flight: output tokens that planned steps will bring, not known yet.
    blocks: KV block ids in token order.
    published: leading blocks that are in the prefix cache.
    slot: row of the runner's per-sequence state; -1 unless running.
    order: (priority, number of arrival); requests are served in this order, smallest first.
    *_at: seconds on the caller's clock.
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
    published: int = 0
    slot: int = -1
    block_hashes: list[bytes] = field(default_factory=list)
    num_cached: int = 0
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    scheduled_at: float | None = None
    first_token_at: float | None = None

    @classmethod
    def create(cls, message: GenerateRequest, order: tuple[int, int], max_model_len: int, now: float) -> Request:
        params = message.params
        room = max_model_len - len(message.prompt)
        return cls(
            request_id=message.request_id,
            tokens=list(message.prompt),
            num_prompt=len(message.prompt),
            params=params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            seed=seed_of(message.request_id) if params.seed is None else params.seed % 2**64,
            order=order,
            arrived_at=now,
            cache_salt=message.cache_salt,
            reply_to=message.reply_to,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )

    @property
    def pending(self) -> int:
        """Tokens left to compute. Prefill, a prompt chunk, a cache hit, decode and
        a request whose KV arrived from another pool are all this one subtraction."""
        if self.num_output + self.in_flight >= self.max_tokens:
            return 0  # its last token is on the way
        return len(self.tokens) + self.in_flight - self.computed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    def times(self, now: float) -> RequestTimes | None:
        """Since arrival; None for a request that never ran. Without a first token, `now` stands for it."""
        if self.scheduled_at is None:
            return None
        first = now if self.first_token_at is None else self.first_token_at
        return RequestTimes(self.scheduled_at - self.arrived_at, first - self.arrived_at, now - self.arrived_at)

    def hashes(self, count: int, block_size: int) -> list[bytes]:
        """Chained hashes of the first `count` full blocks of known tokens."""
        while len(self.block_hashes) < count:
            start = len(self.block_hashes) * block_size
            parent = self.block_hashes[-1] if start else root_hash((self.cache_salt,))
            self.block_hashes.append(block_hash(parent, self.tokens[start : start + block_size]))
        return self.block_hashes[:count]


def root_hash(keys: tuple[str, ...]) -> bytes:
    """Parent of a sequence's first block. Sequences share blocks only if all of these keys are equal: whatever beside
    the tokens decides what their KV is, or who may see it (the cache salt; a LoRA adapter's name would be another)."""
    joined = b"".join(len(key.encode()).to_bytes(4, "little") + key.encode() for key in keys)
    return hashlib.blake2b(joined, digest_size=16, person=b"manta-kv-root").digest()


def block_hash(parent: bytes, tokens: list[int]) -> bytes:
    """Name of a block by everything that its KV depends on: all tokens up to its end.

    128 bits of blake2b: a collision would show one user's text to another, so no cheaper hash will do.
    """
    return hashlib.blake2b(parent + array("i", tokens).tobytes(), digest_size=16).digest()


def seed_of(request_id: str) -> int:
    """64-bit seed for a request that brought none; equal wherever the request is run again."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")
