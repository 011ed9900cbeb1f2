"""Which blocks of one handoff may be read, have been read, and are validated right. Pure; see protocol.py."""

from __future__ import annotations

from collections import deque

from engine.kv_transfer.protocol.messages import FirstToken, Progress
from engine.wire.block_hash import block_hash, root_hash
from engine.wire.remote_prefill import RemotePrefillRequest

READ_TOKENS = 4096  # at most, in one read: what has been read in earlier ones survives the death of prefill


class ReceiveState:
    """local: blocks here, from the prefill request's token `skip` on. Counts are of these, from the first one on:
    started, read, validated: that are being read or have been; that have been; that prefill held until after that."""

    def __init__(self, prefill_request: RemotePrefillRequest, local: list[int], block_size: int):
        self.local, self.started, self.read, self.validated = local, 0, 0, 0
        self.remote: list[int] = []
        self.ranks: list[dict[str, bytes]] = []
        self.first: FirstToken | None = None
        self._prefill_request, self._block_size = prefill_request, block_size
        self._num_tokens, self._upto = len(prefill_request.token_ids), prefill_request.skip
        self._unvalidated: deque[tuple[int, int]] = deque()  # (heartbeat, blocks that its echo proves)

    def update(self, message: Progress) -> str | None:
        """Returns what is wrong with the message."""
        if message.upto < self._upto:
            return None  # an older one that comes late
        if problem := self._problem(message):
            return problem
        self.ranks, self.remote, self._upto = message.ranks, message.blocks, message.upto
        self.first = self.first or message.first
        return None

    def start(self) -> tuple[int, int] | None:
        """The next blocks to read, [start, stop)."""
        # before the end only full blocks: a later chunk writes the rest of a partial one
        whole = self._upto == self._num_tokens
        readable = len(self.local) if whole else (self._upto - self._prefill_request.skip) // self._block_size
        if readable == self.started:
            return None
        start = self.started
        self.started = min(readable, start + max(1, READ_TOKENS // self._block_size))
        return start, self.started

    def ended(self, next_heartbeat: int) -> None:
        """All that was started has been read, and that was before this heartbeat is sent."""
        self.read = self.started
        self._unvalidated.append((next_heartbeat, self.read))

    def echoed(self, heartbeat: int) -> None:
        """Prefill held all blocks when it got this heartbeat."""
        while self._unvalidated and self._unvalidated[0][0] <= heartbeat:
            self.validated = self._unvalidated.popleft()[1]

    @property
    def complete(self) -> bool:
        return self.read == len(self.local) and self.first is not None

    @property
    def is_asked_prompt(self) -> bool:
        """Prefill computed the prompt that it was given."""
        return self.first is not None and self.first.prompt_hash == hash_prompt(self._prefill_request, self._block_size)

    @property
    def verified(self) -> int:
        """Leading tokens of the prompt, in whole blocks, whose KV is here and right."""
        verified = self._prefill_request.skip + self.validated * self._block_size
        return min(verified, self._num_tokens // self._block_size * self._block_size)

    def _problem(self, message: Progress) -> str | None:
        missing = message.upto - self._prefill_request.skip
        if message.upto > self._num_tokens:
            return f"{message.upto} tokens computed of {self._num_tokens}"
        if len(message.blocks) < -(-missing // self._block_size):
            return f"{len(message.blocks)} blocks named for {missing} tokens"
        if message.blocks[: self.started] != self.remote[: self.started]:
            return "blocks that were read have changed"
        if message.first is not None and message.upto < self._num_tokens:
            return f"first token known, but only {message.upto} of {self._num_tokens} tokens computed"
        return None


def hash_prompt(prefill_request: RemotePrefillRequest, block_size: int) -> bytes:
    """Name of the last block of the prefill request's tokens, full or not, as FirstToken.prompt_hash gives it."""
    parent = root_hash((prefill_request.cache_salt,))
    for start in range(0, len(prefill_request.token_ids), block_size):
        parent = block_hash(parent, prefill_request.token_ids[start : start + block_size])
    return parent
