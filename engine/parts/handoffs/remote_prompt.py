"""What one request keeps of its handoffs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.core.request import PrefixUse, Request, RequestClock
from engine.wire.remote_request import RemoteRequest

HANDOFFS = "handoffs"  # in Request.of


@dataclass(slots=True)
class RemotePrompt:
    """Remote prefill state of one request's prompt."""

    where: Literal["auto", "local", "remote"] = "auto"
    """Where the client wants the prompt computed (GenerateRequest.prefill)."""
    handoff_id: str = ""
    """Id of its newest handoff."""
    num_attempts: int = 0
    local_only: bool = False
    """Whether a handoff failed in a way that a retry cannot fix."""


def remote_of(request: Request) -> RemotePrompt:
    """Return what a request keeps of its handoffs."""
    remote: RemotePrompt | None = request.of.get(HANDOFFS)
    if remote is None:
        remote = request.of[HANDOFFS] = RemotePrompt()
    return remote


def request_for(asked_by: RemoteRequest, now: float) -> Request:
    """Return a request that computes another engine's prompt and samples one token."""
    return Request(
        request_id=asked_by.handoff_id,
        tokens=list(asked_by.token_ids),
        num_prompt=asked_by.num_prompt,
        params=asked_by.params,
        max_tokens=len(asked_by.token_ids) - asked_by.num_prompt + 1,
        seed=asked_by.seed,
        clock=RequestClock.starting(now, asked_by.timeout_s, asked_by.ttft_slo_s),
        client=asked_by.client,
        prefix=PrefixUse(asked_by.cache_salt),
        asked_by=asked_by,
    )
