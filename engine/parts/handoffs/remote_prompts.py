"""Prompts of this engine whose KV comes from another engine, which computes or has it. Pure Python."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from engine.core.request import Request
from engine.costs.request_cost import cost_of
from engine.errors import EngineUnavailable
from engine.parts.handoffs.handoff_requests import HandoffRequests, handed_over
from engine.parts.handoffs.remote_prefill_policy import (
    MOVED,
    LocalLoad,
    PendingPrompt,
    PrefillDecision,
    RemotePrefillPolicy,
)
from engine.parts.handoffs.remote_prompt import remote_of
from engine.parts.kept import KV_SOURCE, source_of
from engine.wire.handoff import CancelHandoff, Failed, OpenHandoff, Received
from engine.wire.parts.handoffs import CancelDispatch, DispatchRemote, HandoffTimes

RESUMED = "resumed"  # the prompt was already computed once, so it stays here
ASKED = "asked"  # the request says where its prompt is computed


class RemotePrompts:
    """Decides which prompts other engines compute, and asks them for the KV."""

    def __init__(self, policy: RemotePrefillPolicy | None, requests: HandoffRequests, moves: Counter[str]):
        """policy: None if this engine computes all of its prompts. moves: counts requests that moved here by outcome:
        `received` or `failed`."""
        self.policy, self._requests, self._moves = policy, requests, moves
        #: requests whose KV another engine computes, by handoff id; their blocks must not be reused until the handoff
        #: is over, even if the request itself has ended
        self.receiving: dict[str, Request] = {}
        self.opened_at: dict[str, float] = {}  #: by handoff id

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
        if remote_of(request).where == "remote" and not local_only:
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
        if remote_of(request).where != "remote" or not self._local_only(request):
            return None
        why = f"{event.reason} {event.detail}".rstrip()
        return EngineUnavailable(f"no other engine could compute the prompt: {why}")

    def _local_only(self, request: Request) -> str:
        assert self.policy is not None
        if request.clock.first_token_at is not None or request.num_preemptions:
            return RESUMED
        if request.prompt_logprobs is not None:
            return "prompt_logprobs"
        if not request.generates:
            return "pooling"
        if remote_of(request).where == "local":
            return ASKED
        if remote_of(request).num_attempts >= self.policy.config.max_attempts:
            return "attempts"
        return "failed" if remote_of(request).local_only else ""

    def count(self, remote: bool, reason: str) -> None:
        """Count a decision that is carried out."""
        if self.policy is not None and reason not in ("", RESUMED, MOVED):
            self.policy.count(remote, reason)

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
        requests, source = self._requests, source_of(request)
        assert requests.peer is not None
        remote_of(request).num_attempts += source is None
        clock = request.clock
        timeout_s = None if math.isinf(clock.deadline_at) else max(0.0, clock.deadline_at - now)
        handoff_id = requests.new_id(request) if source is None else source.handoff_id
        is_wanted = clock.first_token_by < math.inf and clock.first_token_at is None
        ttft_slo_s = clock.first_token_by - now if is_wanted else None
        remote_request = requests.prompt(request, handoff_id, requests.peer, cached, timeout_s, ttft_slo_s)
        remote_of(request).handoff_id = handoff_id
        self.receiving[handoff_id] = request
        self.opened_at[handoff_id] = now
        first, *others = handed_over(request, cached, block_size)
        requests.ask(OpenHandoff(remote_request, first, others, None if source is None else source.engine))
        if source is None:
            requests.out.post("control", DispatchRemote(remote_request), after_steps=True)

    def cancel(self, request: Request) -> None:
        """Cancel the handoff of an ended request. The request stays in `receiving` as long as its blocks may be
        written."""
        self._requests.send(CancelHandoff(remote_of(request).handoff_id, cost_of(request).coming.compute_ns))
        if source_of(request) is None:
            self._requests.out.post("control", CancelDispatch(remote_of(request).handoff_id))

    def received(self, event: Received, now: float) -> Request:
        """Record that all KV of a request has come. Returns the request."""
        request = self._close(event.handoff_id, now)
        if self._moved(request, "received") or self.policy is None:
            del self.opened_at[event.handoff_id]
            return request
        prompt = PendingPrompt(len(request.tokens), request.prefix.num_cached)
        self.policy.received(prompt, event.first.cached, now - self.opened_at.pop(event.handoff_id))
        return request

    def failed(self, event: Failed, now: float) -> Request:
        """Record that the KV of a request does not come. Returns the request."""
        request = self._close(event.handoff_id, now)
        del self.opened_at[event.handoff_id]
        if self._moved(request, "failed"):
            return request
        remote_of(request).local_only = not event.retry
        self._requests.out.post("control", CancelDispatch(event.handoff_id))
        return request

    def _moves_here(self, request: Request) -> bool:
        """Return whether another engine holds the KV of a request, and can send it here."""
        return self._requests.peer is not None and source_of(request) is not None

    def _moved(self, request: Request, outcome: str) -> bool:
        """Return whether an ended handoff was a move of a request to this engine. Counts the outcome, and forgets the
        request's source."""
        moved, request.of[KV_SOURCE] = source_of(request) is not None, None
        self._moves[outcome] += moved
        return moved

    def _close(self, handoff_id: str, now: float) -> Request:
        """Record the end of a handoff and return its request."""
        request = self.receiving.pop(handoff_id)
        arrived_at = request.clock.arrived_at
        request.news.append(HandoffTimes(self.opened_at[handoff_id] - arrived_at, now - arrived_at))
        return request
