"""Which blocks of one handoff may be read, have been read, and are proven right. Pure; see protocol.py."""

from __future__ import annotations

from collections import deque

from engine.kv_transfer.protocol.messages import FirstToken, Progress
from engine.wire.block_hash import block_hash, root_hash
from engine.wire.remote_prefill import RemotePrefillRequest

READ_TOKENS = 4096  # at most, in one read: what has been read in earlier ones survives the death of prefill


class ReceiveState:
    """local: blocks here, from the ticket's token `skip` on. Counts are of these, from the first one on:
    started, read, proven: that are being read or have been; that have been; that prefill held until after that."""

    def __init__(self, ticket: RemotePrefillRequest, local: list[int], block_size: int):
        self.local, self.started, self.read, self.proven = local, 0, 0, 0
        self.remote: list[int] = []
        self.ranks: list[dict[str, bytes]] = []
        self.first: FirstToken | None = None
        self._ticket, self._block_size = ticket, block_size
        self._num_tokens, self._upto = len(ticket.token_ids), ticket.skip
        self._proofs: deque[tuple[int, int]] = deque()  # (heartbeat, blocks that its echo proves)

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
        readable = len(self.local) if whole else (self._upto - self._ticket.skip) // self._block_size
        if readable == self.started:
            return None
        start = self.started
        self.started = min(readable, start + max(1, READ_TOKENS // self._block_size))
        return start, self.started

    def ended(self, next_heartbeat: int) -> None:
        """All that was started has been read, and that was before this heartbeat is sent."""
        self.read = self.started
        self._proofs.append((next_heartbeat, self.read))

    def echoed(self, heartbeat: int) -> None:
        """Prefill held all blocks when it got this heartbeat."""
        while self._proofs and self._proofs[0][0] <= heartbeat:
            self.proven = self._proofs.popleft()[1]

    @property
    def complete(self) -> bool:
        return self.read == len(self.local) and self.first is not None

    @property
    def is_asked_prompt(self) -> bool:
        """Prefill computed the prompt that it was given."""
        return self.first is not None and self.first.chain == chain_hash(self._ticket, self._block_size)

    @property
    def verified(self) -> int:
        """Leading tokens of the prompt, in whole blocks, whose KV is here and right."""
        verified = self._ticket.skip + self.proven * self._block_size
        return min(verified, self._num_tokens // self._block_size * self._block_size)

    def _problem(self, message: Progress) -> str | None:
        missing = message.upto - self._ticket.skip
        if message.upto > self._num_tokens:
            return f"{message.upto} tokens computed of {self._num_tokens}"
        if len(message.blocks) < -(-missing // self._block_size):
            return f"{len(message.blocks)} blocks named for {missing} tokens"
        if message.blocks[: self.started] != self.remote[: self.started]:
            return "blocks that were read have changed"
        if message.first is not None and message.upto < self._num_tokens:
            return f"first token known, but only {message.upto} of {self._num_tokens} tokens computed"
        return None


def chain_hash(ticket: RemotePrefillRequest, block_size: int) -> bytes:
    """Name of the last block of the ticket's tokens, full or not, as FirstToken.chain gives it."""
    chain = root_hash((ticket.cache_salt,))
    for start in range(0, len(ticket.token_ids), block_size):
        chain = block_hash(chain, ticket.token_ids[start : start + block_size])
    return chain
