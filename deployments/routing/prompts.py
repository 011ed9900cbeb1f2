"""From token ids to what a router compares: done once per prompt, where it is known first."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.routing.cost import PromptDigest
from deployments.routing.prefix_index import block_keys
from engine.wire.block_hash import block_hashes


class PromptDigester:
    """block_size: of the engines' KV blocks; None where they share no prefixes."""

    def __init__(self, block_size: int | None):
        self._block_size = block_size
        self._last: tuple[list[int], str, Sequence[int]] = ([], "", ())

    def digest(self, request_id: str, tokens: list[int], cache_salt: str, session: str = "") -> PromptDigest:
        return PromptDigest(request_id, len(tokens), self._keys(tokens, cache_salt), session)

    def _keys(self, tokens: list[int], cache_salt: str) -> Sequence[int]:
        if self._block_size is None:
            return ()
        known, salt, keys = self._last
        if known is not tokens or salt != cache_salt:  # several answers to one prompt share the list
            keys = block_keys(block_hashes(tokens, self._block_size, cache_salt))
            self._last = (tokens, cache_salt, keys)
        return keys
