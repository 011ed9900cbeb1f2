"""The digest of a prompt that routers compare: computed once per prompt, where its token ids are known first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deployments.routing.prefix_index import block_keys
from engine.wire.block_hash import block_hashes


@dataclass(frozen=True, slots=True)
class PromptDigest:
    request_id: str
    num_tokens: int
    keys: Sequence[int]  #: `block_keys` of its full blocks, in order
    session: str = ""  #: requests of one session should meet in one engine; empty for none


class PromptDigester:
    def __init__(self, block_size: int | None):
        """block_size: tokens per KV block of the engines; None where they share no prefixes."""
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
