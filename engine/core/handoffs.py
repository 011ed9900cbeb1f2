"""The scheduler's view of handoffs: whose KV is on its way, whose is read by others, and what has to be told of it."""

from __future__ import annotations

import msgspec

from engine.core.remote_prefill_policy import LocalLoad, PendingPrompt, PrefillDecision, RemotePrefillPolicy
from engine.core.request import Request
from engine.errors import InvalidParameter
from engine.kv_transfer.protocol.actions import (
    CancelHandoff,
    FinishPrefill,
    HandoffAction,
    OpenHandoff,
    RefusePrefill,
    ReportProgress,
)
from engine.kv_transfer.protocol.events import Received
from engine.kv_transfer.protocol.messages import FirstToken
from engine.wire.messages import CancelDispatch, DispatchPrefill, PrefillReplica, TokenLogprob
from engine.wire.remote_prefill import Peer, RemotePrefillRequest

RESUMED = "resumed"  # its prompt was computed before, so there is nothing to decide
ASKED = "asked"  # the request says where
HandoffOutput = HandoffAction | DispatchPrefill | CancelDispatch  # for the channel; for the control actor


class HandoffManager:
    """Belongs to one scheduler, which moves the requests and their blocks. Pure Python.

    receiving: by handoff id, requests whose KV another engine computes. Their blocks must not be touched until it is
        over, even if the request itself has ended.
    leased: by handoff id, prompts that were computed for others, and whose blocks may still be read.
    actions: for the channel, and for the control actor, oldest first; the caller empties it.
    """

    def __init__(self, policy: RemotePrefillPolicy | None = None, peer: Peer | None = None, fingerprint: str = ""):
        """policy: of an engine that may have its prompts computed by others; `peer` is then this engine."""
        self._policy, self._peer, self.fingerprint = policy, peer, fingerprint
        self.receiving: dict[str, Request] = {}
        self.leased: dict[str, Request] = {}
        self.actions: list[HandoffOutput] = []
        self._opened_at: dict[str, float] = {}
        self._count = 0

    # -- a prompt of ours, computed by another engine ------------------------------------------------------

    @property
    def decides(self) -> bool:
        """Whether there is a choice."""
        return self._policy is not None

    def decide(self, request: Request, cached: int, running: list[Request]) -> PrefillDecision:
        """Where the prompt of a waiting request should be computed. cached: leading tokens that are here."""
        if self._policy is None or request.prefill_request is not None:
            return PrefillDecision(False, "")
        load = LocalLoad(
            queued=sum(r.queued_tokens for r in running),
            receiving=sum(len(r.tokens) for r in self.receiving.values()),
            decoding=sum(r.pending <= 1 for r in running),
        )
        local_only = self._local_only(request)
        if request.prefill == "remote" and not local_only:
            return PrefillDecision(True, ASKED)
        return self._policy.decide(PendingPrompt(len(request.tokens), cached, local_only), load)

    def gives_up(self, request: Request) -> bool:
        """Whether a handoff of this request has failed for good, and its prompt must not be computed here."""
        return request.prefill == "remote" and bool(self._local_only(request))

    def _local_only(self, request: Request) -> str:
        assert self._policy is not None
        if request.first_token_at is not None or request.num_preemptions:
            return RESUMED
        if request.prompt_logprobs is not None:
            return "prompt_logprobs"
        if request.prefill == "local":
            return ASKED
        if request.num_remote_attempts >= self._policy.config.max_attempts:
            return "attempts"
        return "failed" if request.local_prefill_only else ""

    def count(self, decision: PrefillDecision) -> None:
        """It is carried out."""
        if self._policy is not None and decision.reason not in ("", RESUMED):
            self._policy.count(decision)

    def decisions(self) -> dict[str, dict[str, int]]:
        """How often prompts were computed where, and why."""
        found: dict[str, dict[str, int]] = {}
        if self._policy is not None:
            for (where, reason), count in self._policy.decisions.items():
                found.setdefault(where, {})[reason] = count
        return found

    def open(self, request: Request, cached: int, now: float, block_size: int) -> None:
        """The request holds all blocks that its prompt needs; the first `cached` tokens are there already."""
        assert self._peer is not None
        self._count += 1
        request.num_remote_attempts += 1
        prefill_request = RemotePrefillRequest(
            handoff_id=f"{request.request_id}/{self._peer.epoch:x}.{self._count}",
            request_id=request.request_id,
            attempt=request.num_remote_attempts,
            token_ids=list(request.tokens),
            num_prompt=request.num_prompt,
            params=request.params,
            seed=request.seed,
            cache_salt=request.cache_salt,
            skip=cached,
            fingerprint=self.fingerprint,
            decode=self._peer,
            timeout_s=None if request.deadline_at is None else max(0.0, request.deadline_at - now),
        )
        request.handoff_id = prefill_request.handoff_id
        self.receiving[prefill_request.handoff_id] = request
        self._opened_at[prefill_request.handoff_id] = now
        stop = -(-len(request.tokens) // block_size)
        self.actions.append(OpenHandoff(prefill_request, request.blocks[cached // block_size : stop]))
        self.actions.append(DispatchPrefill(prefill_request))

    def cancel(self, request: Request) -> None:
        """The request has ended; it stays in `receiving` until nothing writes into its blocks any more."""
        self.actions.append(CancelHandoff(request.handoff_id))
        self.actions.append(CancelDispatch(request.handoff_id))

    def received(self, event: Received, now: float) -> Request:
        request = self.receiving.pop(event.handoff_id)
        assert self._policy is not None
        prompt = PendingPrompt(len(request.tokens), request.num_cached)
        self._policy.received(prompt, event.first.cached, now - self._opened_at.pop(event.handoff_id))
        return request

    def failed(self, handoff_id: str, retry: bool) -> Request:
        request = self.receiving.pop(handoff_id)
        del self._opened_at[handoff_id]
        request.local_prefill_only = not retry
        self.actions.append(CancelDispatch(handoff_id))
        return request

    def set_prefill_replicas(self, replicas: list[PrefillReplica]) -> None:
        if self._policy is not None:
            self._policy.replicas = replicas

    # -- the prompt of another engine, computed here -------------------------------------------------------

    def check(self, prefill_request: RemotePrefillRequest) -> None:
        """Raise RequestError if KV that is computed here would be of no use there."""
        if prefill_request.fingerprint != self.fingerprint:
            raise InvalidParameter(
                "fingerprint", prefill_request.fingerprint, f"that of this engine ({self.fingerprint})"
            )

    def report(self, request: Request, computed: int, block_size: int) -> None:
        """The KV of `computed` tokens is complete, and its full blocks are published.

        A block that is not full may still be exchanged for another of the same content when it is published, so only
        the one at the very end of the prompt, which never is, is told of.
        """
        prefill_request = request.prefill_request
        assert prefill_request is not None
        upto = computed if computed == len(request.tokens) else computed // block_size * block_size
        if upto > prefill_request.skip:
            blocks = request.blocks[prefill_request.skip // block_size : -(-upto // block_size)]
            self.actions.append(ReportProgress(prefill_request.handoff_id, upto, blocks))

    def finish(self, request: Request, token: int, logprob: TokenLogprob | None, block_size: int) -> None:
        assert request.prefill_request is not None
        engine_id = "" if self._peer is None else self._peer.engine_id
        timeline = [msgspec.structs.replace(event, where=engine_id) for event in request.take_timeline()]
        first = FirstToken(token, logprob, request.last_hash(block_size), request.num_cached, timeline)
        self.actions.append(FinishPrefill(request.prefill_request.handoff_id, first))

    def refuse(self, request: Request, reason: str) -> None:
        assert request.prefill_request is not None
        self.actions.append(RefusePrefill(request.prefill_request, reason))
