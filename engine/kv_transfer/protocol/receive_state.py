"""Decode's state of the blocks of one handoff: readable, read and validated. Pure; see protocol.py."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import accumulate

from engine.kv_transfer.protocol.messages import Progress
from engine.wire.block_hash import block_hash, root_hash, with_places
from engine.wire.handoff import FirstToken
from engine.wire.parts.adapter import ModelAdapter, digest_of, extra_keys
from engine.wire.parts.images import images_in, places_of
from engine.wire.remote_request import RemoteRequest

MAX_READ_TOKENS = 4096  # per read, so that blocks of earlier reads survive the death of prefill


class ReceiveState:
    """Progress of one handoff through its blocks, which are read in order."""

    def __init__(self, remote_request: RemoteRequest, groups: list[list[int]], block_size: int, named: bool = False):
        """groups: local blocks of each KV cache group, as in OpenHandoff. named: whether the blocks are asked for by
        name. If so, the sender may have only the first of them, and sends no hash of a prompt."""
        self.local = [block for blocks in groups for block in blocks]
        self.remote: list[int] = []
        self.started = 0  #: leading blocks whose read has started
        self.read = 0  #: leading blocks whose read has ended
        self.validated = 0  #: leading blocks that prefill still held after their read
        self.ranks: list[dict[str, bytes]] = []
        self.first: FirstToken | None = None
        self._remote_request, self._block_size = remote_request, block_size
        self._num_tokens, self._upto = len(remote_request.token_ids), remote_request.skip
        self._ends = list(accumulate(map(len, groups)))  # end of each group in `local`
        self._unvalidated: deque[tuple[int, int]] = deque()  # (heartbeat, blocks that its echo validates)
        self._named = named

    def update(self, message: Progress) -> str | None:
        """Apply a message. Returns what is wrong with the message, or None."""
        if message.upto < self._upto:
            return None  # an older message that arrives late
        if self._named and self._by_blocks and message.first is not None and message.upto < self._num_tokens:
            self._shrink(message.upto)
        if problem := self._problem(message):
            return problem
        self.ranks, self.remote, self._upto = message.ranks, message.blocks, message.upto
        self.first = self.first or message.first
        return None

    def start(self) -> tuple[int, int, int] | None:
        """Return the next blocks to read as (start, stop, group); None if none are ready yet."""
        # until the prompt is complete, only full blocks: a later chunk completes a partial one
        whole = self._upto == self._num_tokens
        readable = len(self.local) if whole else (self._upto - self._remote_request.skip) // self._block_size
        if readable == self.started:
            return None
        start = self.started
        group = bisect_right(self._ends, start)
        self.started = min(readable, self._ends[group], start + max(1, MAX_READ_TOKENS // self._block_size))
        return start, self.started, group

    def ended(self, next_heartbeat: int) -> None:
        """Record that all started reads have ended before heartbeat number `next_heartbeat` is sent."""
        self.read = self.started
        self._unvalidated.append((next_heartbeat, self.read))

    def echoed(self, heartbeat: int) -> None:
        """Record that prefill still held all blocks when it received this heartbeat."""
        while self._unvalidated and self._unvalidated[0][0] <= heartbeat:
            self.validated = self._unvalidated.popleft()[1]

    @property
    def complete(self) -> bool:
        return self.read == len(self.local) and self.first is not None

    @property
    def is_asked_prompt(self) -> bool:
        """Whether prefill computed the prompt that it was asked for."""
        if self._named or self.first is None:
            return self._named
        return self.first.prompt_hash == hash_prompt(self._remote_request, self._block_size)

    @property
    def verified(self) -> int:
        """Number of leading prompt tokens, in whole blocks, whose KV has arrived and is correct in all groups. With
        several groups, or one with a window, only the skipped tokens count until all blocks are validated."""
        skip, size, by_blocks = self._remote_request.skip, self._block_size, self._by_blocks
        if not by_blocks and self.validated < len(self.local):
            return skip
        verified = skip + self.validated * size if by_blocks else self._num_tokens
        return min(verified, self._num_tokens // size * size)

    @property
    def _by_blocks(self) -> bool:
        """Whether each block has the KV of its tokens in all layers."""
        missing = self._num_tokens - self._remote_request.skip
        return len(self._ends) == 1 and len(self.local) == -(-missing // self._block_size)

    def _shrink(self, num_tokens: int) -> None:
        """Ask only for the first `num_tokens` tokens, which end with a whole block."""
        self._num_tokens = num_tokens
        del self.local[(num_tokens - self._remote_request.skip) // self._block_size :]
        self._ends = [len(self.local)]

    def _problem(self, message: Progress) -> str | None:
        missing = message.upto - self._remote_request.skip
        if message.upto > self._num_tokens:
            return f"{message.upto} tokens computed of {self._num_tokens}"
        needed = len(self.local) if message.upto == self._num_tokens else -(-missing // self._block_size)
        if len(message.blocks) < needed:
            return f"{len(message.blocks)} blocks named for {missing} tokens"
        if message.blocks[: self.started] != self.remote[: self.started]:
            return "blocks that were read have changed"
        if self._named and message.first is not None and message.first.cached != message.upto:
            return f"{message.upto} tokens held, but {message.first.cached} said to be"
        if message.first is not None and message.upto < self._num_tokens:
            return f"first token known, but only {message.upto} of {self._num_tokens} tokens computed"
        return None


def hash_prompt(remote_request: RemoteRequest, block_size: int) -> bytes:
    """Return the hash of the last block of the request's prompt, full or not. This hash covers the whole prompt."""
    parent = root_hash(remote_request.cache_salt, extra_keys(digest_of(remote_request.record(ModelAdapter))))
    places = places_of(images_in(remote_request))
    for start in range(0, len(remote_request.token_ids), block_size):
        tokens = remote_request.token_ids[start : start + block_size]
        parent = block_hash(with_places(parent, places, start, start + len(tokens)), tokens)
    return parent
