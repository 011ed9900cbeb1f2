"""How one engine hands KV over. Frozen; part of EngineConfig."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConfig:
    """role: `prefill` computes prompts for others, `decode` may have its prompts computed by others.
    transport: how blocks travel; `auto` takes the fastest that both sides have.
    policy: where a decode engine has prompts computed; `auto` weighs the cost of both places.
    lease_s: how long prefill holds the blocks of a handoff after the last sign of life of decode.
    heartbeat_s: how often decode gives one.
    progress_s: without an answer to heartbeats, or without a byte in a read, until the link counts as cut.
    accept_s: until a prefill engine must have taken a ticket.
    rest_s: how long a pair of engines rests after its link has failed.
    max_attempts: remote tries per request; then the prompt is computed locally.
    """

    role: Literal["prefill", "decode"]
    transport: Literal["auto", "tcp", "nixl", "nccl"] = "auto"
    policy: Literal["auto", "always", "never"] = "auto"
    lease_s: float = 10.0
    heartbeat_s: float = 1.0
    progress_s: float = 5.0
    accept_s: float = 5.0
    rest_s: float = 30.0
    max_attempts: int = 3

    def __post_init__(self) -> None:
        for key in ("lease_s", "heartbeat_s", "progress_s", "accept_s"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"handoff.{key}", getattr(self, key), "above 0")
        if self.lease_s < 3 * self.heartbeat_s:
            raise ConfigError("handoff.lease_s", self.lease_s, f"at least 3 heartbeats ({3 * self.heartbeat_s:g} s)")
        if self.max_attempts < 1:
            raise ConfigError("handoff.max_attempts", self.max_attempts, "at least 1")
