"""The context that a Serve call gives to the router of its handle: the digest of its prompt, and the call itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from deployments.routing.prefix_index import block_keys
from deployments.routing.stats import RoutingStats
from engine.wire.block_hash import block_hashes
from engine.wire.model_identity import ModelIdentity
from engine.wire.multimodal import MultiModalFeatureSpec

# answered: the engine had the request, and has ended it. lost: the replica is gone, or its engine. ended: all else.
CallOutcome = Literal["answered", "lost", "ended"]


@dataclass(frozen=True, slots=True)
class PromptDigest:
    """The part of a prompt that routers compare, computed once, where its token ids are known first."""

    request_id: str
    num_tokens: int
    keys: Sequence[int]  #: `block_keys` of its full blocks, in order
    session: str = ""  #: requests of one session should meet in one engine; empty for none
    images: tuple[tuple[int, int], ...] = ()  #: the end of each image in the prompt, and its embeddings


class PromptDigester:
    def __init__(self, block_size: int | None):
        """block_size: tokens per KV block of the engines; None where they share no prefixes."""
        self._block_size = block_size
        self._last: tuple[list[int], str, Sequence[int]] = ([], "", ())

    def digest(
        self,
        request_id: str,
        tokens: list[int],
        cache_salt: str,
        session: str = "",
        images: Sequence[MultiModalFeatureSpec] = (),
    ) -> PromptDigest:
        ends = tuple((image.mm_position.end, image.num_embeds) for image in images)
        return PromptDigest(request_id, len(tokens), self._keys(tokens, cache_salt, images), session, ends)

    def _keys(self, tokens: list[int], cache_salt: str, images: Sequence[MultiModalFeatureSpec]) -> Sequence[int]:
        if self._block_size is None:
            return ()
        known, salt, keys = self._last
        if known is not tokens or salt != cache_salt:  # several answers to one prompt share the list
            keys = block_keys(block_hashes(tokens, self._block_size, cache_salt, images))
            self._last = (tokens, cache_salt, keys)
        return keys


EMPTY = PromptDigest("", 0, ())


class RoutingContext:
    """The router runs in the caller's process, but perhaps in another thread.

    Nothing of it travels to the replica: what arrives there is empty. The caller closes it when the call has ended,
    which Serve may not know yet: over gRPC, Serve learns that a replica has accepted a call only when the call ends.
    """

    def __init__(
        self,
        prompt: PromptDigest = EMPTY,
        stats: RoutingStats | None = None,
        avoid: Sequence[str] = (),
        model: ModelIdentity | None = None,
        note: Callable[[str], None] | None = None,
    ):
        """stats: where the router counts.
        avoid: engines that should not get the call if there are others.
        model: the model that the call is for, if there are such engines.
        note: called with a sentence about where the router sends the call, each time it tries.
        """
        self.prompt, self.avoid, self.model = prompt, avoid, model
        self.stats = RoutingStats() if stats is None else stats
        self.note = note or (lambda _: None)
        self._outcome: CallOutcome | None = None
        self._release: Callable[[CallOutcome], object] | None = None

    def placed(self, release: Callable[[CallOutcome], object]) -> None:
        """release: called when the call has ended; perhaps twice, and from any thread."""
        self._release = release
        if self._outcome is not None:  # just now: `close` may have come too early to see `release`
            release(self._outcome)

    def close(self, outcome: CallOutcome) -> None:
        self._outcome = outcome
        if self._release is not None:
            self._release(outcome)

    def __reduce__(self) -> tuple[type[RoutingContext], tuple[()]]:
        return RoutingContext, ()
