"""Handoffs of one scheduler. Pure Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from engine.core.door.kernel import Kernel
from engine.core.door.offers import ComputeSeconds, Offer
from engine.core.door.request_checks import not_elsewhere
from engine.core.kv_cache_manager import Shorten
from engine.core.output import Event, last_delta
from engine.core.request import Request, State
from engine.core.request_queue import RequestQueue
from engine.costs.request_cost import cost_of
from engine.costs.step_cost import StepTimes
from engine.errors import Moved, Overloaded, ServingError
from engine.parts.block_source import BlockSource
from engine.parts.handoffs import moves
from engine.parts.handoffs.handoff_requests import HandoffRequests
from engine.parts.handoffs.prompts_for_others import STUCK, PromptsForOthers
from engine.parts.handoffs.remote_prefill_policy import RemotePrefillPolicy
from engine.parts.handoffs.remote_prompt import HANDOFFS, RemotePrompt, request_for
from engine.parts.handoffs.remote_prompts import RemotePrompts
from engine.parts.kept import KV_SOURCE
from engine.wire.generate_request import GenerateRequest
from engine.wire.handoff import (
    BlocksAsked,
    Closed,
    Failed,
    HandoffEvent,
    Noted,
    Quarantine,
    Received,
    RefusePrefill,
    Spent,
)
from engine.wire.parts.handoffs import HandoffTotals, PrefillReplica
from engine.wire.parts.pooling import PoolingParams
from engine.wire.remote_request import KVSource, Peer, RemoteRequest
from engine.wire.stats.handoff_stats import Role
from engine.wire.token_delta import TokenDelta, TokenLogprob

BEFORE_OTHERS = 1 << 40  # arrivals


class Handoffs(BlockSource):
    """Has other engines compute prompts, computes prompts for them, and moves requests between engines.

    A request whose KV another engine computes holds all blocks that the prompt needs. It gets a slot only once the KV
    has arrived, and continues as if its prompt had been cached. The blocks of a request computed for another engine
    stay until that engine has read them.
    """

    asks, field = KVSource, "prefill"
    _kernel: Kernel
    _block_size: int

    def __init__(
        self,
        policy: RemotePrefillPolicy | None = None,
        peer: Peer | None = None,
        fingerprint: str = "",
        role: Role | None = None,
        numerics: str = "",
    ):
        """policy: decides which prompts other engines compute; None if this engine computes all of its prompts.
        peer, fingerprint, numerics: as for HandoffRequests.
        role: whether this engine answers requests or computes prompts for others; None if that cannot change. It is a
        label that routers obey, since the engine can do both."""
        #: requests that moved, by outcome: `received` and `failed` here; `released`, `cancelled` or `expired` from here
        self.moves: Counter[str] = Counter()
        self.requests = HandoffRequests(peer, fingerprint, numerics)
        self.remote = RemotePrompts(policy, self.requests, self.moves)
        self.for_others = PromptsForOthers(self.requests, self.moves)
        self.role = role
        self.role_changes = 0
        #: Called with each event of the channel before this part takes it; returns whether the event is its own.
        self.listeners: list[Callable[[HandoffEvent, float], bool]] = []
        self._decided = False, ""  # of the request whose turn it is: whether another engine computes it, and why

    def attach(self, kernel: Kernel) -> None:
        super().attach(kernel)
        self._kernel = kernel
        self.requests.out = kernel.out
        self._block_size = kernel.kv_cache.pool.block_size

    # -- prompts of this engine ----------------------------------------------------------------------------

    def check(self, asked: GenerateRequest | RemoteRequest, prompt: Sequence[int]) -> None:
        if isinstance(asked, RemoteRequest) or asked.prefill != "remote":
            return
        pools = asked.record(PoolingParams) is not None
        if pools or asked.params.prompt_logprobs is not None or self.remote.policy is None:
            raise not_elsewhere(asked.prefill)

    def opened(self, request: Request, asked: GenerateRequest | RemoteRequest) -> None:
        if isinstance(asked, GenerateRequest):
            request.of[HANDOFFS] = RemotePrompt(asked.prefill)
            if (source := asked.record(KVSource)) is not None:
                request.of[KV_SOURCE] = source
                priority, arrival = request.order
                request.order = priority, arrival - BEFORE_OTHERS  # it ran already

    def may_receive(self, request: Request) -> bool:
        return self.remote.may_receive(request)

    def offer(self, request: Request, matched: int, shorten: Shorten, watermark: int, now: float) -> Offer | None:
        cached = matched * self._block_size
        decision = self.remote.decide(request, cached, self._kernel.queue.running)
        self._decided = decision.remote, decision.reason
        if not decision.remote:
            return None

        def start(now: float) -> bool:
            self.remote.open(request, cached, now, self._block_size)
            return True

        return Offer(len(request.tokens) - cached, decision.seconds, start, keeps_blocks=True, source=decision.source)

    def reserved(self, request: Request, matched: int, now: float) -> None:
        remote, reason = self._decided
        self.remote.count(remote, reason)
        if reason and not remote:
            request.note(f"no other engine computes the prompt: {reason}")

    def compute_s(self, tokens: int) -> float | None:
        """Return what computing so many tokens of a prompt here is expected to cost all requests, in seconds; None
        while unknown. This is what the policy compares with the time that another engine takes."""
        policy = self.remote.policy
        if policy is None or not policy.step_cost.coefficients[1]:
            return None
        return policy.local_s(tokens, self.remote.load(self._kernel.queue.running))

    # -- prompts of other engines --------------------------------------------------------------------------

    def rest(self, engines: list[str]) -> None:
        """Ask these engines for nothing for now, since the links to them have just failed. Replaces those before."""
        self.requests.resting = engines
        if self.remote.policy is not None:
            self.remote.policy.resting = engines

    def add(self, asked_by: RemoteRequest, now: float) -> Request:
        """Queue a prompt that another engine asked for, or raise a ServingError and change nothing."""
        self.for_others.check(asked_by)
        request = request_for(asked_by, now)
        self._kernel.check_prompt(request, asked_by)
        return self._kernel.enqueue(request, asked_by)

    def started(self, request: Request) -> None:
        if request.asked_by:
            self.for_others.report(request, request.computed, self._block_size)

    def progressed(
        self,
        request: Request,
        computed: int,
        tokens: list[int],
        logprobs: list[TokenLogprob] | None,
        error: ServingError | None,
    ) -> None:
        self.for_others.report(request, computed, self._block_size)
        if not tokens:
            return
        request.in_flight -= 1
        if error is not None:
            self.for_others.refuse(request, str(error))
        else:
            self.for_others.finish(request, tokens[0], logprobs[0] if logprobs else None, self._block_size)
        self.for_others.lease(request, self._kernel.queue)

    def cancelled(self, request: Request, reason: str) -> bool:
        if not request.asked_by:
            return False
        if request.state is not State.LEASED:
            self.for_others.lease(request, self._kernel.queue)
        self.for_others.refuse(request, reason)
        return True

    def stuck(self, queue: RequestQueue, now: float) -> list[Request]:
        """Return the prompts of other engines that could wait for blocks for ever, as PromptsForOthers.stuck does. Only
        an engine whose role can change has any."""
        return [] if self.role is None else self.for_others.stuck(queue, waits=bool(self.remote.receiving), now=now)

    def refuse_stuck(self, now: float) -> None:
        """Refuse those prompts."""
        for request in self.stuck(self._kernel.queue, now):
            self._kernel.abort(request.request_id, now, Overloaded(STUCK))

    # -- requests that move --------------------------------------------------------------------------------

    def move(self, others: list[Request], count: int, now: float) -> None:
        """Have other engines continue up to `count` requests. Waiting requests leave at once. If `count` is not
        reached, running requests leave after their next token, with their KV. others: as for moves.choose."""
        for request in moves.choose(self._kernel.queue, others, count):
            self._kernel.abort(request.request_id, now, Moved(request.request_id))

    def let_go(self, request: Request, delta: TokenDelta, now: float) -> bool:
        kernel = self._kernel
        last = moves.stop(request, delta, kernel.kv_cache, self.for_others)
        if last is None:
            return False
        kernel.totals.generation_tokens -= 1  # the other engine counts the token that this one has not sent
        error = Moved(request.request_id)
        if not last.records(KVSource):
            kernel.finish(request, "error", now, last, error=error)
        else:
            self.for_others.lease(request, kernel.queue)
            kernel.out.events.append(Event(request, last_delta(request, last, "error", now, error)))
        return True

    # -- what becomes of a request -------------------------------------------------------------------------

    def keeps(self) -> list[Request]:
        return [*self.remote.receiving.values(), *self.for_others.leased.values()]

    def ending(self, request: Request, error: ServingError | None) -> None:
        if request.state is State.WAITING_FOR_REMOTE_KV:
            self.remote.cancel(request)
        if request.asked_by:
            self.for_others.leased.pop(request.asked_by.handoff_id, None)

    def handle(self, event: HandoffEvent, now: float) -> None:
        """Record an event of the channel."""
        if any(heard(event, now) for heard in self.listeners):
            return
        match event:
            case Spent(handoff_id, cost):
                if handoff_id in self.remote.receiving:
                    cost_of(self.remote.receiving[handoff_id]).coming = cost
            case Noted():
                if noted := self._kernel.queue.live.get(event.request_id):
                    noted.timeline.append(event.what)
            case BlocksAsked():
                self.requests.send(RefusePrefill(event.remote_request, "no other engine may fetch blocks of this one"))
            case Closed(handoff_id):
                leased = self.for_others.leased.get(handoff_id)
                request = leased or self._kernel.queue.live[handoff_id]  # one not leased is still being computed
                self._kernel.finish(request, self.for_others.closed(request, event), now)
            case Received():
                self._received(event, now)
            case Failed():
                self._failed(event, now)

    def _received(self, event: Received, now: float) -> None:
        request, first, kernel = self.remote.received(event, now), event.first, self._kernel
        verified = min(group.received(request) for group in kernel.kv_cache.groups)
        skip = request.tables[0].num_cached
        if not self._keep(request, verified):
            return
        if self.arrivals is not None and self.requests.same_bits(first):
            hashes = request.hashes(verified // self._block_size, self._block_size)[skip:]
            self.arrivals.came(self, "handoff", first.engine_id, request, hashes)
        request.timeline += first.timeline
        cost_of(request).received(event.byte_ns)
        request.computed, request.in_flight = verified, 1
        request.prefix.num_cached = max(request.prefix.num_cached, first.cached)
        kernel.arrived(request, first.token, first.logprob, now)

    def _failed(self, event: Failed, now: float) -> None:
        request, kernel = self.remote.failed(event, now), self._kernel
        if not self._keep(request, event.verified):
            return
        cost_of(request).failed()
        kernel.kv_cache.invalidate(request, request.tables[0].num_cached)  # the other's logits may not be finite
        kernel.kv_cache.release(request)
        if (error := self.remote.final_error(request, event)) is not None:
            kernel.finish(request, "error", now, error=error)

    def _keep(self, request: Request, verified: int) -> bool:
        """Cache the blocks that have arrived for a request, up to `verified` tokens, and queue the request. Returns
        False if the request has ended meanwhile; its blocks are then released."""
        self._kernel.kv_cache.cache_blocks(request, verified)
        if request.state is State.FINISHED:
            self._kernel.kv_cache.release(request)
            return False
        self._kernel.queue.wait(request)
        return True

    def quarantine(self, name: str) -> None:
        self.requests.send(Quarantine(name))

    # -- a role that changes -------------------------------------------------------------------------------

    def set_prefill_replicas(self, replicas: list[PrefillReplica]) -> None:
        """Set the engines that can compute prompts for this one; there are none if its role is `prefill`."""
        if self.remote.policy is not None:
            self.remote.policy.replicas = [] if self.role == "prefill" else replicas

    def switch(self, role: Role) -> None:
        """Take another role. Requests already in this engine are not affected."""
        self.role, self.role_changes = role, self.role_changes + 1
        self.set_prefill_replicas([])

    # -- what it tells -------------------------------------------------------------------------------------

    def report(self) -> HandoffTotals:
        return HandoffTotals(self.remote.decisions(), dict(self.moves))


def compute_seconds(times: StepTimes, handoffs: Handoffs | None) -> ComputeSeconds:
    """Return what tells the engine's offers what computing takes: the policy's measure if there is a policy, since its
    offers are measured by it."""
    return times.compute_s if handoffs is None or handoffs.remote.policy is None else handoffs.compute_s
