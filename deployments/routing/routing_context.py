"""Context that a Serve call gives to its handle's router: the digest of its prompt, and the call itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deployments.routing.config import Role
from deployments.routing.prefix_index import block_keys
from deployments.routing.stats import RoutingStats
from engine.wire.block_hash import block_hashes
from engine.wire.model_identity import ModelIdentity
from engine.wire.multimodal import MultiModalFeatureSpec
from engine.wire.remote_request import KVHolder

# answered: the engine had the request and has ended it. lost: the replica or its engine is gone. engine_lost: only the
# engine is gone, and others of its replica go on. ended: anything else.
CallOutcome = Literal["answered", "lost", "engine_lost", "ended"]


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
            keys = block_keys(block_hashes(tokens, self._block_size, cache_salt, images, adapter))
            self._last = (tokens, (cache_salt, adapter), keys)
        return keys


EMPTY = PromptDigest("", 0, ())


class RoutingContext:
    """Context of one call. The router runs in the caller's process, but possibly in another thread.

    The replica gets only `holder` and `engine` from the context. The caller closes the context when the call has ended;
    Serve may learn of that later: over gRPC, it learns that a replica has accepted a call only when the call ends.
    """

    def __init__(
        self,
        prompt: PromptDigest = EMPTY,
        stats: RoutingStats | None = None,
        avoid: Sequence[str] = (),
        model: ModelIdentity | None = None,
        note: Callable[[str], None] | None = None,
        role: Role = "decode",
    ):
        """stats: where the router counts.
        avoid: ids of engines that should not get the call if there are others.
        model: model that the call needs, if any engine serves it.
        note: function called with a sentence each time the router chooses a replica.
        role: role that a replica needs for the call, if any replica has it; the same for all calls of a handle."""
        self.prompt, self.avoid, self.model, self.role = prompt, avoid, model, role
        self.stats = RoutingStats() if stats is None else stats
        self.note = note or (lambda _: None)
        self.holder: KVHolder | None = None  #: set by the router: an engine from which the chosen one may fetch KV
        self.engine = ""  #: set by the router: id of the chosen engine
        self._outcome: CallOutcome | None = None
        self._release: Callable[[CallOutcome], object] | None = None

    def placed(self, release: Callable[[CallOutcome], object]) -> None:
        """Register `release`. It is called when the call has ended, perhaps twice, and from any thread."""
        self._release = release
        if self._outcome is not None:  # `close` may have run just before `release` was set
            release(self._outcome)

    def close(self, outcome: CallOutcome) -> None:
        self._outcome = outcome
        if self._release is not None:
            self._release(outcome)

    def __reduce__(self) -> tuple[type[RoutingContext], tuple[()], dict[str, Any]]:
        return RoutingContext, (), {"holder": self.holder, "engine": self.engine}
