"""Options of KV events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.config_options import check_limits, option
from engine.engine_options import EngineOptions
from engine.errors import ConfigError
from engine.options.choices import check_choices
from engine.options.section import set_section


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


@dataclass(frozen=True, kw_only=True)
class KVEventOptions(EngineOptions):
    kv_events_config: KVEventsConfig | None = option(
        None, "KV events for other routers, as a JSON object of vLLM's keys (docs/routing.md)."
    )

    def check(self) -> None:
        super().check()
        set_section(self, "kv_events_config", KVEventsConfig)
        if self.kv_events_config is not None and self.kv_events_config.publishes and not self.enable_prefix_caching:
            raise ConfigError(
                "enable_prefix_caching",
                False,
                "true with KV events, because they report the blocks of the prefix cache",
            )
