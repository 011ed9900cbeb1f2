"""Options of engines that compute for each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.config_options import check_limits, option
from engine.engine_options import EngineOptions
from engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConfig:
    """Options of an engine in a cluster with several pools, some of which compute prompts or images for others
    (docs/handoff.md)."""

    role: Literal["prefill", "decode", "encode", "replica"] = field(
        metadata={
            "help": "Do not write this key: Manta sets it from the pool. `prefill` computes prompts for decode "
            "engines; `decode` may let prefill engines compute its prompts; `encode` encodes images for both; "
            "`replica` only moves running requests and fetches cached KV, which `decode` can also do."
        }
    )
    transport: Literal["auto", "tcp", "nixl"] = option(
        "auto",
        "How KV blocks are transferred: `tcp`, `nixl`, or `auto`, the fastest transport that both sides have.",
    )
    policy: Literal["auto", "always", "never"] = option(
        "auto", "Whether prefill engines compute the prompts: `always`, `never`, or `auto`, which compares the costs."
    )
    lease_s: float = option(
        10.0,
        "Seconds that a prefill engine keeps the blocks of a handoff after the decode engine's last heartbeat.",
    )
    heartbeat_s: float = option(1.0, "Seconds between the heartbeats of a decode engine.")
    progress_s: float = option(
        5.0,
        "Seconds without an answer to a heartbeat, or without a byte of a read, after which a link counts as broken.",
    )
    accept_s: float = option(5.0, "Seconds within which a prefill engine must accept a request.")
    quarantine_s: float = option(30.0, "Seconds without handoffs between two engines after their link has failed.")
    max_attempts: int = option(
        3, "Maximum number of remote attempts per request. If all fail, its prompt is computed locally."
    )

    move_requests: bool = option(
        True,
        "Whether running requests of a replica that stops, or that is out of KV blocks, move to another replica, "
        "with their KV. Needs no prefill pool.",
    )

    enable_prefix_fetching: bool = option(
        False,
        "Whether a replica fetches KV that another replica of its pool has cached, if that is faster than "
        "computing it. Needs no prefill pool.",
    )
    fetch_timeout_s: float = option(
        5.0, "Seconds that a request waits for KV from another replica's cache. After this time, the KV is computed."
    )

    switch_roles: bool = option(
        False,
        "Whether replicas change between the prefill and the decode pool under load, in about a second and without a "
        "restart. Needs a `prefill` section with the same options as `decode`, and the autoscaling policy.",
    )

    def __post_init__(self) -> None:
        times = "lease_s heartbeat_s progress_s accept_s fetch_timeout_s"
        check_limits(self, {"above 0": times, "at least 1": "max_attempts"}, "handoff.")
        if self.lease_s < 3 * self.heartbeat_s:
            raise ConfigError("handoff.lease_s", self.lease_s, f"at least 3 heartbeats ({3 * self.heartbeat_s:g} s)")


@dataclass(frozen=True, kw_only=True)
class HandoffOptions(EngineOptions):
    handoff: HandoffConfig | None = option(None, "Options of an engine that takes part in handoffs, in any role.")
    encode: HandoffConfig | None = option(
        None, "Options for image handoffs, in an engine whose images may be encoded by encode replicas."
    )

    def check(self) -> None:
        super().check()
        if self.handoff is not None and self.handoff.enable_prefix_fetching and not self.enable_prefix_caching:
            limit = "true with `handoff.enable_prefix_fetching`, because KV is fetched into the prefix cache"
            raise ConfigError("enable_prefix_caching", False, limit)
