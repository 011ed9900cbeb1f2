"""The scheduler's side of handoffs: prompts computed by other engines, and prompts computed for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from engine.core.door.outputs import Outputs
from engine.core.features.remote_prefill_policy import (
    MOVED,
    LocalLoad,
    PendingPrompt,
    PrefillDecision,
    RemotePrefillPolicy,
)
from engine.core.request import Request
from engine.core.request_queue import RequestQueue
from engine.errors import EngineUnavailable, InvalidParameter
from engine.wire.handoff import (
    BlocksAsked,
    CancelHandoff,
    Closed,
    Failed,
    FinishPrefill,
    FirstToken,
    HandoffAction,
    HeldBlocks,
    HoldRequest,
    OpenHandoff,
    Received,
    RefusePrefill,
    ReportProgress,
)
from engine.wire.messages import CancelDispatch, DispatchRemote, PrefillReplica
from engine.wire.remote_request import NOBODY, KVSource, Peer, RemoteRequest
from engine.wire.stats.handoff_stats import Role
from engine.wire.token_delta import FinishReason, TokenLogprob

RESUMED = "resumed"  # the prompt was already computed once, so it stays here
STUCK_S = 5.0  # without progress of other engines' prompts, while this engine waits for prompts of its own
STUCK = "the prompt waits for blocks, while this engine waits for prompts of its own"
ASKED = "asked"  # the request says where its prompt is computed


class HandoffManager:
    """Handoffs of one scheduler. The scheduler itself moves requests and blocks. Pure Python."""

    def __init__(
        self,
        policy: RemotePrefillPolicy | None = None,
        peer: Peer | None = None,
        fingerprint: str = "",
        role: Role | None = None,
    ):
        """policy: decides which prompts other engines compute; None if this engine computes all of its prompts.
        peer: this engine as others address it.
        fingerprint: identity of model and KV layout; only engines with the same one exchange KV.
        role: whether this engine answers requests or computes prompts for others; None if that cannot change."""
        self.policy, self._peer, self.fingerprint = policy, peer, fingerprint
        #: requests whose KV another engine computes, by handoff id; their blocks must not be reused until the handoff
        #: is over, even if the request itself has ended
        self.receiving: dict[str, Request] = {}
        #: prompts computed for other engines, and requests that have stopped here, whose blocks others may still read;
        #: by handoff id
        self.leased: dict[str, Request] = {}
        self.out = Outputs()  # the scheduler's
        #: requests that moved, by outcome: `received` and `failed` here; `released`, `cancelled` or `expired` from here
        self.moves: Counter[str] = Counter()
        #: A label that routers obey, since the engine can do both. None if its pool says what it does.
        self.role = role
        self.role_changes = 0
        self._next_prompt: tuple[Request | None, float] = None, 0.0  # of another engine, and since when it is the next
        self._opened_at: dict[str, float] = {}
        self._count = 0

    def send(self, action: HandoffAction) -> None:
        """Have the channel carry out an action."""
        self.out.post("engines", action)

    def ask(self, opened: OpenHandoff) -> None:
        """Ask another engine for KV, once no step in flight writes to the blocks that are to receive it."""
        self.out.post("engines", opened, after_steps=True)

    # -- a prompt of ours, computed by another engine ------------------------------------------------------

    @property
    def decides(self) -> bool:
        """Whether this engine can have prompts computed by other engines."""
        return self.policy is not None

    def may_receive(self, request: Request) -> bool:
        """Return whether this engine can get the KV of a request from another engine."""
        return self.policy is not None or self._moves_here(request)

    def decide(self, request: Request, cached: int, running: Sequence[Request]) -> PrefillDecision:
        """Decide where to compute the prompt of a waiting request. cached: number of leading tokens whose KV this
        engine has."""
        if self._moves_here(request):
            return PrefillDecision(True, MOVED)
        if self.policy is None or request.asked_by is not None:
            return PrefillDecision(False, "")
        local_only = self._local_only(request)
        if request.remote.where == "remote" and not local_only:
            return PrefillDecision(True, ASKED)
        return self.policy.decide(PendingPrompt(len(request.tokens), cached, local_only), self.load(running))

    def load(self, running: Sequence[Request]) -> LocalLoad:
        """Return the load of this engine."""
        return LocalLoad(
            queued=sum(r.queued_tokens for r in running),
            receiving=sum(len(r.tokens) for r in self.receiving.values()),
            decoding=sum(r.pending <= 1 for r in running),
        )

    def final_error(self, request: Request, event: Failed) -> EngineUnavailable | None:
        """Return the error that ends a request after a failed handoff; None if its prompt can still be computed, here
        or by another engine."""
        if request.remote.where != "remote" or not self._local_only(request):
            return None
        why = f"{event.reason} {event.detail}".rstrip()
        return EngineUnavailable(f"no other engine could compute the prompt: {why}")

    def _local_only(self, request: Request) -> str:
        assert self.policy is not None
        if request.clock.first_token_at is not None or request.num_preemptions:
            return RESUMED
        if request.prompt_logprobs is not None:
            return "prompt_logprobs"
        if request.pooling is not None:
            return "pooling"
        if request.remote.where == "local":
            return ASKED
        if request.remote.num_attempts >= self.policy.config.max_attempts:
            return "attempts"
        return "failed" if request.remote.local_only else ""

    def count(self, decision: PrefillDecision) -> None:
        """Count a decision that is carried out."""
        if self.policy is not None and decision.reason not in ("", RESUMED, MOVED):
            self.policy.count(decision)

    def decisions(self) -> dict[str, dict[str, int]]:
        """Return numbers of prompts by where they were computed (`local` or `remote`), and then by reason."""
        found: dict[str, dict[str, int]] = {}
        if self.policy is not None:
            for (where, reason), count in self.policy.decisions.items():
                found.setdefault(where, {})[reason] = count
        return found

    def open(self, request: Request, cached: int, now: float, block_size: int) -> None:
        """Ask another engine for the KV of a request that already holds all blocks for it. The other engine either has
        that KV, or computes it.

        cached: leading tokens whose KV those blocks already contain.
        """
        assert self._peer is not None
        source = request.remote.source
        request.remote.num_attempts += source is None
        timeout_s = None if request.clock.deadline_at is None else max(0.0, request.clock.deadline_at - now)
        remote_request = self._request(
            request, self._new_id(request) if source is None else source.handoff_id, self._peer, cached, timeout_s
        )
        request.remote.handoff_id = remote_request.handoff_id
        self.receiving[remote_request.handoff_id] = request
        self._opened_at[remote_request.handoff_id] = now
        first, *others = handed_over(request, cached, block_size)
        self.ask(OpenHandoff(remote_request, first, others, None if source is None else source.engine))
        if source is None:
            self.out.post("control", DispatchRemote(remote_request), after_steps=True)

    def fetch(self, request: Request, skip: int, upto: int, timeout_s: float) -> RemoteRequest:
        """Return the RemoteRequest for the KV of tokens [skip, upto), which another engine has cached. timeout_s:
        seconds that `request` waits for it."""
        assert self._peer is not None
        asked = self._request(request, self._new_id(request), self._peer, skip, timeout_s)
        return msgspec.structs.replace(asked, token_ids=request.tokens[:upto])

    def _new_id(self, request: Request) -> str:
        assert self._peer is not None
        self._count += 1
        return f"{request.request_id}/{self._peer.epoch:x}.{self._count}"

    def _request(
        self, request: Request, handoff_id: str, decode: Peer, skip: int = 0, timeout_s: float | None = None
    ) -> RemoteRequest:
        return RemoteRequest(
            handoff_id=handoff_id,
            request_id=request.request_id,
            attempt=request.remote.num_attempts,
            token_ids=list(request.tokens),
            num_prompt=request.num_prompt,
            params=request.params,
            seed=request.seed,
            cache_salt=request.prefix.salt,
            skip=skip,
            fingerprint=self.fingerprint,
            decode=decode,
            timeout_s=timeout_s,
            mm_features=request.images,
            lora=request.lora,
        )

    def cancel(self, request: Request) -> None:
        """Cancel the handoff of an ended request. The request stays in `receiving` as long as its blocks may be
        written."""
        self.send(CancelHandoff(request.remote.handoff_id, request.cost.coming.compute_ns))
        if request.remote.source is None:
            self.out.post("control", CancelDispatch(request.remote.handoff_id))

    def received(self, event: Received, now: float) -> Request:
        request = self._close(event.handoff_id, now)
        if self._moved(request, "received") or self.policy is None:
            del self._opened_at[event.handoff_id]
            return request
        prompt = PendingPrompt(len(request.tokens), request.prefix.num_cached)
        self.policy.received(prompt, event.first.cached, now - self._opened_at.pop(event.handoff_id))
        return request

    def failed(self, event: Failed, now: float) -> Request:
        request = self._close(event.handoff_id, now)
        del self._opened_at[event.handoff_id]
        if self._moved(request, "failed"):
            return request
        request.remote.local_only = not event.retry
        self.out.post("control", CancelDispatch(event.handoff_id))
        return request

    def _moves_here(self, request: Request) -> bool:
        """Return whether another engine holds the KV of a request, and can send it here."""
        return self._peer is not None and request.remote.source is not None

    def _moved(self, request: Request, outcome: str) -> bool:
        """Return whether an ended handoff was a move of a request to this engine. Counts the outcome, and forgets the
        request's source."""
        moved, request.remote.source = request.remote.source is not None, None
        self.moves[outcome] += moved
        return moved

    def _close(self, handoff_id: str, now: float) -> Request:
        """Record the end of a handoff and return its request."""
        request = self.receiving.pop(handoff_id)
        request.remote.handoff_at = request.remote.handoff_at and (request.remote.handoff_at[0], now)
        return request

    def set_prefill_replicas(self, replicas: list[PrefillReplica]) -> None:
        """Set the engines that can compute prompts for this one; there are none if its role is `prefill`."""
        if self.policy is not None:
            self.policy.replicas = [] if self.role == "prefill" else replicas

    # -- a role that changes -------------------------------------------------------------------------------

    def switch(self, role: Role) -> None:
        """Take another role. Requests already in this engine are not affected."""
        self.role, self.role_changes = role, self.role_changes + 1
        self.set_prefill_replicas([])

    def stuck(self, queue: RequestQueue, now: float) -> list[Request]:
        """Return the prompts of other engines that this engine must refuse: they have waited for STUCK_S, while this
        engine computed no prompt for others and its own requests waited for KV. To be called at least once a second.

        Engines that change roles at the same time could otherwise wait for each other: each would have given its blocks
        to requests whose prompts wait for blocks of the other engine.
        """
        asked = [request for request in queue.waiting if request.asked_by and not request.tables and self.role]
        first = next(iter(asked), None)
        if first is not self._next_prompt[0] or not self.receiving or any(r.asked_by for r in queue.running):
            self._next_prompt = first, now
        if now - self._next_prompt[1] < STUCK_S:
            return []
        return [request for request in asked if now - request.clock.arrived_at >= STUCK_S]

    # -- the prompt of another engine, computed here -------------------------------------------------------

    def check(self, remote_request: RemoteRequest) -> None:
        """Raise RequestError if the engine that sent this request could not use KV computed here."""
        if remote_request.fingerprint != self.fingerprint:
            raise InvalidParameter(
                "fingerprint", remote_request.fingerprint, f"that of this engine ({self.fingerprint})"
            )
        if remote_request.decode == self._peer:  # routers may know its role a moment later than the engine itself
            raise InvalidParameter("decode", remote_request.decode.engine_id, "another engine")

    def report(self, request: Request, computed: int, block_size: int) -> None:
        """Report that the KV of `computed` tokens is complete. Their full blocks must already be cached.

        A partly filled block is reported only at the end of the prompt. Before that, the prefix cache may replace it by
        another block of the same content.
        """
        asked_by, whole = request.asked_by, computed == len(request.tokens)
        assert asked_by is not None
        upto = computed if whole else computed // block_size * block_size
        if upto <= asked_by.skip or not (whole or request.tables[0].keeps_all):
            return
        groups = handed_over(request, asked_by.skip, block_size)
        blocks = [block for group in groups for block in group] if whole else groups[0]
        upto_blocks = None if whole else (upto - asked_by.skip) // block_size
        told = request.cost.told()
        self.send(ReportProgress(asked_by.handoff_id, upto, blocks[:upto_blocks], *told))

    def finish(self, request: Request, token: int, logprob: TokenLogprob | None, block_size: int) -> None:
        assert request.asked_by is not None
        first = self._first(request, token, logprob, block_size)
        self.send(FinishPrefill(request.asked_by.handoff_id, first))

    def _first(self, request: Request, token: int, logprob: TokenLogprob | None, block_size: int) -> FirstToken:
        engine_id = "" if self._peer is None else self._peer.engine_id
        timeline = [msgspec.structs.replace(event, where=engine_id) for event in request.take_timeline()]
        return FirstToken(token, logprob, request.last_hash(block_size), request.prefix.num_cached, timeline)

    def refuse(self, request: Request, reason: str) -> None:
        assert request.asked_by is not None
        self.send(RefusePrefill(request.asked_by, reason))

    def refuse_blocks(self, asked: BlocksAsked) -> None:
        self.send(RefusePrefill(asked.remote_request, "no other engine may fetch blocks of this one"))

    # -- a request that moves from here to another engine --------------------------------------------------

    def hold(
        self, request: Request, groups: list[HeldBlocks], token: int, logprob: TokenLogprob | None, block_size: int
    ) -> KVSource:
        """Hold the KV of a stopped request for the engine that will continue it. token: the request's next token."""
        assert self._peer is not None
        request.asked_by = self._request(request, self._new_id(request), NOBODY)
        self.send(HoldRequest(request.asked_by, groups, self._first(request, token, logprob, block_size)))
        return KVSource(request.asked_by.handoff_id, self._peer)

    def closed(self, request: Request, event: Closed) -> FinishReason:
        """Record that no other engine reads a request's blocks any more. Returns the request's finish reason."""
        assert request.asked_by is not None
        if request.asked_by.decode == NOBODY:
            self.moves[event.reason] += 1
            return "abort"  # it ends elsewhere
        request.cost.paid_ns = event.paid_ns
        return "length" if event.reason == "released" else "abort"


def handed_over(request: Request, skip: int, block_size: int) -> list[list[int]]:
    """Return the block ids to hand over, one list for each KV cache group: the blocks of known tokens from `skip` on,
    as far as a later token attends to them. A model with recurrent layers adds a group of state snapshots."""
    first, stop = skip // block_size, -(-len(request.tokens) // block_size)
    blocks = [table.blocks[max(first, table.num_released) : stop] for table in request.tables]
    return blocks + request.states.handed_over
