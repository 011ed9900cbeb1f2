"""What requests have used together."""

from __future__ import annotations

import msgspec

OTHERS = "(others)"  # name of all that are not told apart


class UsageTotals(msgspec.Struct):
    """Sums over sequences that have ended, with or without an error."""

    sequences: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of prompts that were cached."""
    output_tokens: int = 0
    compute_s: float = 0.0
    wasted_s: float = 0.0
    kv_gib_s: float = 0.0
    cost: float = 0.0
    """Money by the prices of the models; 0 without prices."""
    tier_gib_s: float = 0.0

    def add(self, other: UsageTotals) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def payer_of(client: str) -> str:
    """Return the name of the API key of a client; empty for a client without a key. client: as in
    GenerateRequest.client."""
    kind, _, name = client.partition(":")
    return name if kind in ("key", "batch") else ""
