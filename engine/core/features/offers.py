"""KV of prompts that can come from elsewhere, and the choice among it. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.core.costs.step_cost import StepTimes
from engine.core.door.offer import Offer
from engine.core.features.handoffs import HandoffManager
from engine.core.features.remote_prefill_policy import PrefillDecision
from engine.core.kv_cache_manager import Shorten
from engine.core.request import Request


class Offers:
    """Chooses among the offers for a prompt: the one with which all of its KV is here first, if what the offer lacks is
    computed here afterwards.

    The order of the sources decides among offers that take equally long. It also decides while it is unknown what
    computing takes, and if one of the offers does not say what it takes. A handoff comes last. Once the KV of an offer
    has come, what the prompt still lacks may be offered again.
    """

    def __init__(
        self,
        sources: Sequence[Callable[..., Offer | None]],
        handoffs: HandoffManager,
        times: StepTimes,
        block_size: int,
    ):
        """sources: Part.offer of those that have KV. times: learned costs of computing here."""
        self._sources, self._handoffs, self._times, self._block_size = list(sources), handoffs, times, block_size

    def take(
        self,
        request: Request,
        matched: int,
        decision: PrefillDecision,
        running: Sequence[Request],
        shorten: Shorten,
        watermark: int,
        now: float,
    ) -> Offer | None:
        """Return the best offer for a waiting request; None if its prompt is to be computed here. The offer has been
        started, unless it keeps blocks: then the caller starts it, once the request has them.

        decision: of the handoffs. running: requests that are computed here. Other arguments as for Part.offer.
        """
        found = (offer(request, matched, shorten, watermark, now) for offer in self._sources)
        offers, cached = [offer for offer in found if offer is not None], matched * self._block_size
        if decision.remote:
            offers.append(self._of_handoff(request, cached, decision))
        best_first = self._sorted(offers, len(request.tokens) - cached, running)
        return next((offer for offer in best_first if offer.keeps_blocks or offer.start(now)), None)

    def _of_handoff(self, request: Request, cached: int, decision: PrefillDecision) -> Offer:
        """Return the offer of another engine that computes, or has, the KV of all tokens but the first `cached`."""

        def start(now: float) -> bool:
            self._handoffs.open(request, cached, now, self._block_size)
            return True

        return Offer(len(request.tokens) - cached, decision.seconds, start, keeps_blocks=True)

    def _sorted(self, offers: list[Offer], missing: int, running: Sequence[Request]) -> list[Offer]:
        """Return the offers for a prompt that lacks so many tokens, the best first."""
        if len(offers) < 2 or not self._times.prompt_token_s:
            return offers
        totals: list[float] = []
        for offer in offers:
            if offer.seconds is None:
                return offers
            totals.append(offer.seconds + self._compute_s(missing - offer.tokens, running))
        return [offers[i] for i in sorted(range(len(offers)), key=totals.__getitem__)]

    def _compute_s(self, tokens: int, running: Sequence[Request]) -> float:
        """Return what computing tokens of a prompt here is expected to take, by the measure of the handoffs if other
        engines can compute them as well."""
        if tokens <= 0:
            return 0.0
        if self._handoffs.policy is None:
            return self._times.prompt_token_s * tokens
        return self._handoffs.policy.local_s(tokens, self._handoffs.load(running))
