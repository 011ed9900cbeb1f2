"""The parts of a prompt that routers compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deployments.routing.prefix_index import block_keys
from engine.wire.block_hash import block_hashes
from engine.wire.parts.adapter import extra_keys
from engine.wire.parts.images import MultiModalFeatureSpec, places_of


@dataclass(frozen=True, slots=True)
class PromptDigest:
    """The parts of a prompt that routers compare, computed once, where its token ids first become known."""

    request_id: str
    num_tokens: int
    keys: Sequence[int]  #: `block_keys` of its full blocks, in order
    session: str = ""  #: session key: requests of one session should go to one engine; empty for none
    images: tuple[tuple[int, int], ...] = ()  #: (end in the prompt, number of embeddings) of each image
    adapter: str = ""  #: digest of the adapter that computes it; empty for none


class PromptDigester:
    def __init__(self, block_size: int | None):
        """block_size: tokens per KV block of the engines; None if they share no prefixes."""
        self._block_size = block_size
        self._last: tuple[list[int], tuple[str, str], Sequence[int]] = ([], ("", ""), ())

    def digest(
        self,
        request_id: str,
        tokens: list[int],
        cache_salt: str,
        session: str = "",
        images: Sequence[MultiModalFeatureSpec] = (),
        adapter: str = "",
    ) -> PromptDigest:
        ends = tuple((image.mm_position.end, image.num_embeds) for image in images)
        keys = self._keys(tokens, cache_salt, images, adapter)
        return PromptDigest(request_id, len(tokens), keys, session, ends, adapter)

    def _keys(
        self, tokens: list[int], cache_salt: str, images: Sequence[MultiModalFeatureSpec], adapter: str
    ) -> Sequence[int]:
        if self._block_size is None:
            return ()
        known, root, keys = self._last
        if known is not tokens or root != (cache_salt, adapter):  # else it is another answer to the same prompt
            keys = block_keys(
                block_hashes(tokens, self._block_size, cache_salt, places_of(images), extra_keys(adapter))
            )
            self._last = (tokens, (cache_salt, adapter), keys)
        return keys


EMPTY = PromptDigest("", 0, ())
