"""KV of prompts that can come from elsewhere, and the choice among it. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.core.kv_cache_manager import Shorten
from engine.core.request import Request

ComputeSeconds = Callable[[int], float | None]
"""Returns the seconds that computing so many tokens of a prompt here is expected to take; None if that is unknown."""


def unknown(tokens: int) -> float | None:
    return None


@dataclass(frozen=True, slots=True)
class Offer:
    """KV of a prompt's tokens that can come from elsewhere instead of being computed here."""

    tokens: int
    """Number of tokens, besides those that are cached."""
    seconds: float | None
    """Time that it is expected to take; None if nobody can tell, or if it was asked for or promised."""
    start: Callable[[float], bool]
    """Begins, at the given time. Returns False, and does nothing, if there are too few blocks."""
    keeps_blocks: bool = False
    """Whether the request itself holds the blocks that are filled. It must have them before `start`. Otherwise the KV
    comes into the prefix cache, and the request holds no blocks meanwhile."""
    source: str = ""
    """What becomes of the prompt, as a phrase, if the request itself holds the blocks."""


class Offers:
    """Chooses among the offers for a prompt: the one with which all of its KV is here first, if what the offer lacks is
    computed here afterwards.

    The order of the sources decides among offers that take equally long. It also decides while it is unknown what
    computing takes, and if one of the offers does not say what it takes. Once the KV of an offer has come, what the
    prompt still lacks may be offered again.
    """

    def __init__(self, sources: Sequence[Callable[..., Offer | None]], compute_s: ComputeSeconds, block_size: int):
        """sources: Part.offer of those that have KV."""
        self._sources, self._compute_s, self._block_size = list(sources), compute_s, block_size

    def take(
        self,
        request: Request,
        matched: int,
        shorten: Shorten,
        watermark: int,
        now: float,
    ) -> Offer | None:
        """Return the best offer for a waiting request; None if its prompt is to be computed here. The offer has been
        started, unless it keeps blocks: then the caller starts it, once the request has them. The arguments are those
        of Part.offer."""
        found = (offer(request, matched, shorten, watermark, now) for offer in self._sources)
        offers = [offer for offer in found if offer is not None]
        best_first = self._sorted(offers, len(request.tokens) - matched * self._block_size)
        return next((offer for offer in best_first if offer.keeps_blocks or offer.start(now)), None)

    def _sorted(self, offers: list[Offer], missing: int) -> list[Offer]:
        """Return the offers for a prompt that lacks so many tokens, the best first."""
        if len(offers) < 2:
            return offers
        totals: list[float] = []
        for offer in offers:
            left = max(0, missing - offer.tokens)
            computing_s = self._compute_s(left)
            if offer.seconds is None or computing_s is None:
                return offers
            totals.append(offer.seconds + (computing_s if left else 0.0))
        return [offers[i] for i in sorted(range(len(offers)), key=totals.__getitem__)]
