"""What one engine asks other engines for. Pure Python."""

from __future__ import annotations

import msgspec

from engine.core.door.outputs import Outputs
from engine.core.request import Request
from engine.parts.handoffs.remote_prompt import remote_of
from engine.parts.kept import adapter_of, images_of
from engine.wire.handoff import FirstToken, HandoffAction, OpenHandoff
from engine.wire.parts.images import PromptImages
from engine.wire.remote_request import Peer, RemoteRequest


class HandoffRequests:
    """Writes the requests of one scheduler to other engines, and sends them."""

    def __init__(self, peer: Peer | None, fingerprint: str, numerics: str = ""):
        """peer: this engine as others address it; None if it exchanges nothing with others. fingerprint: identity of
        model and KV layout; only engines with the same one exchange KV. numerics: as in FirstToken."""
        self.peer, self.fingerprint, self.numerics = peer, fingerprint, numerics
        self.out = Outputs()  # the scheduler's
        self.resting: list[str] = []  #: ids of engines that are asked for nothing now, as their links have just failed
        self._count = 0

    def send(self, action: HandoffAction) -> None:
        """Have the channel carry out an action."""
        self.out.post("engines", action)

    def ask(self, opened: OpenHandoff) -> None:
        """Ask another engine for KV, once no step in flight writes to the blocks that are to receive it."""
        self.out.post("engines", opened, after_steps=True)

    def same_bits(self, first: FirstToken) -> bool:
        """Return whether this engine would have computed the same bits as the one that says so."""
        return bool(self.numerics) and first.numerics == self.numerics

    def new_id(self, request: Request) -> str:
        """Return an id for a new handoff of a request."""
        assert self.peer is not None
        self._count += 1
        return f"{request.request_id}/{self.peer.epoch:x}.{self._count}"

    def prompt(
        self,
        request: Request,
        handoff_id: str,
        decode: Peer,
        skip: int = 0,
        timeout_s: float | None = None,
        ttft_slo_s: float | None = None,
    ) -> RemoteRequest:
        """Return the RemoteRequest for the KV of all known tokens of a request but the first `skip`. decode: the engine
        that will read it. timeout_s: seconds that the request waits for it. ttft_slo_s: as in RemoteRequest."""
        return RemoteRequest(
            handoff_id=handoff_id,
            request_id=request.request_id,
            attempt=remote_of(request).num_attempts,
            token_ids=list(request.tokens),
            num_prompt=request.num_prompt,
            params=request.params,
            seed=request.seed,
            cache_salt=request.prefix.salt,
            skip=skip,
            fingerprint=self.fingerprint,
            decode=decode,
            client=request.client,
            timeout_s=timeout_s,
            ttft_slo_s=ttft_slo_s,
        ).asking(PromptImages.of(images_of(request)), adapter_of(request))

    def prefix(self, request: Request, skip: int, upto: int, timeout_s: float) -> RemoteRequest:
        """Return the RemoteRequest for the KV of tokens [skip, upto), which another engine has cached. timeout_s:
        seconds that `request` waits for it."""
        assert self.peer is not None
        asked = self.prompt(request, self.new_id(request), self.peer, skip, timeout_s)
        return msgspec.structs.replace(asked, token_ids=request.tokens[:upto])


def handed_over(request: Request, skip: int, block_size: int) -> list[list[int]]:
    """Return the block ids to hand over, one list for each KV cache group: the blocks of known tokens from `skip` on,
    as far as a later token attends to them. A model with recurrent layers adds a group of state snapshots."""
    first, stop = skip // block_size, -(-len(request.tokens) // block_size)
    blocks = [table.blocks[max(first, table.num_released) : stop] for table in request.tables]
    return blocks + request.handed_over
