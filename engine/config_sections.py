"""Sections of an engine's configuration: handoffs, speculative decoding, KV events, and the balance of experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Literal

from engine.config_options import check_choices, check_limits, option
from engine.errors import ConfigError

MAX_SPECULATIVE_TOKENS = 32  # per sequence and step; more never save time


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConfig:
    """Options of an engine in a cluster with several pools, some of which compute prompts or images for others
    (docs/handoff.md)."""

    role: Literal["prefill", "decode", "encode", "replica"] = field(
        metadata={
            "help": "`prefill` computes prompts for decode engines; `decode` may let prefill engines compute "
            "its prompts; `encode` encodes images for both; `replica` only moves running requests and fetches cached "
            "KV, which `decode` can also do."
        }
    )
    transport: Literal["auto", "tcp", "nixl"] = option(
        "auto", "How KV blocks are transferred. `auto` uses the fastest transport that both sides have."
    )
    policy: Literal["auto", "always", "never"] = option(
        "auto", "Whether a decode engine lets prefill engines compute prompts; `auto` compares the costs."
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

    enable_warm_start: bool = option(
        False,
        "Whether a new replica fetches the prefixes that other replicas use most, before it takes requests. Needs "
        "`enable_prefix_fetching`.",
    )
    warm_start_timeout_s: float = option(10.0, "Maximum number of seconds by which a warm start delays a new replica.")
    warm_start_bytes: int = option(2**30, "Maximum number of bytes of KV that a warm start fetches.")

    switch_roles: bool = option(
        False,
        "Whether replicas change between the prefill and the decode pool under load, in about a second and without a "
        "restart. Needs a `prefill` section with the same options as `decode`, and the autoscaling policy.",
    )

    def __post_init__(self) -> None:
        times = "lease_s heartbeat_s progress_s accept_s fetch_timeout_s warm_start_timeout_s"
        check_limits(self, {"above 0": f"{times} warm_start_bytes", "at least 1": "max_attempts"}, "handoff.")
        if self.lease_s < 3 * self.heartbeat_s:
            raise ConfigError("handoff.lease_s", self.lease_s, f"at least 3 heartbeats ({3 * self.heartbeat_s:g} s)")
        if self.enable_warm_start and not self.enable_prefix_fetching:
            raise ConfigError("handoff.enable_warm_start", True, "false without `enable_prefix_fetching`")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Options of speculative decoding, named as in vLLM (docs/speculative_decoding.md)."""

    method: Literal["ngram", "suffix", "draft_model", "eagle3", "mtp", "medusa"] = field(
        metadata={
            "help": "`ngram` looks for the newest tokens earlier in prompt and output, and proposes the tokens "
            "that followed there. `suffix` also looks in earlier answers, and proposes the most frequent continuation. "
            "The other methods have weights: a smaller model, or heads that read this model's hidden states."
        }
    )
    model: str | None = option(None, "`draft_model`, `eagle3` and `medusa`: folder or Hub id of the weights.")
    num_speculative_tokens: int = option(
        5,
        "Maximum number of drafted tokens per sequence and step. Fewer are drafted under load, or if few are accepted.",
    )
    prompt_lookup_min: int = option(2, "`ngram`: minimum length of a match, in tokens.")
    prompt_lookup_max: int = option(5, "`ngram`: maximum length of a match, in tokens; the longest match wins.")
    suffix_decoding_max_tree_depth: int = option(24, "`suffix`: maximum length of a match and its draft together.")
    suffix_decoding_max_cached_requests: int = option(10_000, "`suffix`: earlier answers to keep; 0 keeps none.")
    suffix_decoding_max_spec_factor: float = option(1.0, "`suffix`: drafted tokens per token of the match.")
    suffix_decoding_min_token_prob: float = option(
        0.1, "`suffix`: share of the matches that must agree with a drafted token and all before it."
    )

    def __post_init__(self) -> None:
        check_choices(self, "speculative_config.")
        if not 1 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            limit = f"between 1 and {MAX_SPECULATIVE_TOKENS}"
            raise ConfigError("speculative_config.num_speculative_tokens", self.num_speculative_tokens, limit)
        needs_model = self.method in ("draft_model", "eagle3", "medusa")
        if needs_model != (self.model is not None):
            limit = f"{'given' if needs_model else 'left out'} with method {self.method}"
            raise ConfigError("speculative_config.model", self.model, limit)
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            limit = f"at least 1, and at most prompt_lookup_max ({self.prompt_lookup_max})"
            raise ConfigError("speculative_config.prompt_lookup_min", self.prompt_lookup_min, limit)
        for key, fits, limit in (
            ("max_tree_depth", self.suffix_decoding_max_tree_depth >= 2, "at least 2"),
            ("max_cached_requests", self.suffix_decoding_max_cached_requests >= 0, "at least 0"),
            ("max_spec_factor", 0 < self.suffix_decoding_max_spec_factor < inf, "above 0"),
            ("min_token_prob", 0 <= self.suffix_decoding_min_token_prob <= 1, "between 0 and 1"),
        ):
            if not fits:
                raise ConfigError(
                    f"speculative_config.suffix_decoding_{key}", getattr(self, f"suffix_decoding_{key}"), limit
                )

    @property
    def has_weights(self) -> bool:
        """Whether a second model on the device makes the drafts."""
        return self.method not in ("ngram", "suffix")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Options of KV events in vLLM's format, named as in vLLM (docs/routing.md)."""

    enable_kv_cache_events: bool = option(False, "Publish the blocks of the prefix cache, and their tokens.")
    publisher: Literal["zmq", "null"] | None = option(None, "`null` publishes nothing. Default: `zmq`.")
    endpoint: str | None = option(
        None,
        "ZMQ address to publish at. As in vLLM, it is bound if it contains `*` or `::` or begins with `ipc:`, "
        "and connected to otherwise. Default: port 5557, bound for this machine only. If the port is "
        "taken, an engine binds the next one.",
    )
    replay_endpoint: str | None = option(
        None, "ZMQ address to bind for subscribers that request the batches that they missed."
    )
    buffer_steps: int = option(10_000, "Number of newest batches that are kept for such requests.")
    hwm: int = option(
        100_000, "Maximum number of batches that wait for one subscriber. The subscriber loses further batches."
    )
    topic: str = option("", "First frame of all messages: llm-d expects `kv@ADDRESS@MODEL`.")
    use_int_block_hashes: bool = option(
        True,
        "Send the low 64 bits of hashes as integers instead of 16 bytes. vLLM has the environment variable "
        "`VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES` for this.",
    )

    def __post_init__(self) -> None:
        check_choices(self, "kv_events_config.")
        check_limits(self, {"at least 1": "buffer_steps hwm"}, "kv_events_config.")

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    def check_engines(self, count: int) -> None:
        """Raise ConfigError if so many engines of one machine cannot have addresses of their own."""
        for key, address in (("endpoint", self.endpoint), ("replay_endpoint", self.replay_endpoint)):
            if count > 1 and (address or "").startswith("ipc:"):
                limit = f"a TCP address with data_parallel_size {count}: each engine binds the next free port"
                raise ConfigError(f"kv_events_config.{key}", address, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class EPLBConfig:
    """Options of the expert parallel load balancer, named as in vLLM (docs/rank_groups.md)."""

    window_size: int = option(1000, "Number of steps over which the load of experts is measured.")
    step_interval: int = option(3000, "Number of steps between two decisions to move experts.")
    num_redundant_experts: int = option(
        0,
        "Number of copies, of each layer's experts together, beyond the first copy of each expert. The most loaded "
        "experts have several copies, on different ranks.",
    )
    log_balancedness: bool = option(False, "Log the mean load of a rank divided by the maximum, once per window.")

    def __post_init__(self) -> None:
        for key, least in (("window_size", 1), ("step_interval", self.window_size), ("num_redundant_experts", 0)):
            if getattr(self, key) < least:
                limit = f"at least {least}{' (window_size)' if key == 'step_interval' else ''}"
                raise ConfigError(f"eplb_config.{key}", getattr(self, key), limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsConfig:
    """Options of structured outputs, named as in vLLM (docs/structured_outputs.md)."""

    disable_additional_properties: bool = option(
        True,
        "Whether an object whose JSON schema lists properties, and says nothing of others, has no others. This also "
        "holds for the arguments of calls that are enforced. vLLM's default differs for its backend guidance.",
    )
