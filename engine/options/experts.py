"""Options of mixtures whose ranks share whole experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.config_options import check_limits, option
from engine.errors import ConfigError
from engine.options.kv_events import KVEventOptions
from engine.options.section import set_section
from engine.options.stages import StageOptions

All2AllBackend = Literal["auto", "allgather_reducescatter", "alltoall"]


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


@dataclass(frozen=True, kw_only=True)
class ExpertOptions(KVEventOptions, StageOptions):
    enable_expert_parallel: bool = option(
        False,
        "Give each of the `tensor_parallel_size` x `data_parallel_size` ranks some whole experts of a mixture, instead "
        "of a slice of every expert (docs/rank_groups.md).",
    )
    data_parallel_size: int = option(
        1,
        "Number of engines that share the experts of a mixture. Each has `tensor_parallel_size` ranks and its own "
        "requests, scheduler and KV cache, and computes attention itself; needs `enable_expert_parallel` "
        "(docs/rank_groups.md). Without it, the flag `--data-parallel-size` is `--num-replicas`, as in vLLM.",
    )
    all2all_backend: All2AllBackend = option(
        "auto",
        "How tokens travel between engines of `data_parallel_size` and the ranks that have their experts "
        "(docs/rank_groups.md): `allgather_reducescatter` sends them to all ranks, `alltoall` only to those that need "
        "them. `auto` chooses one of the two.",
    )
    enable_eplb: bool = option(
        False,
        "Move experts between ranks by their measured load, with `enable_expert_parallel` on at least two ranks "
        "(docs/rank_groups.md).",
    )
    eplb_config: EPLBConfig | None = option(
        None, "When experts move and how many copies there are, as a JSON object of vLLM's keys."
    )

    @property
    def world_size(self) -> int:
        """Ranks of all engines that share experts."""
        return self.num_ranks * self.data_parallel_size

    @property
    def slots(self) -> int:
        """Maximum number of sequences that run at a time in all engines that share experts."""
        return self.max_num_seqs * self.data_parallel_size

    @property
    def layout(self) -> tuple[int, bool, bool, int]:
        """How layers are split over ranks. Without `determinism: strict`, it may change bits of an answer."""
        spread = self.enable_expert_parallel and self.tensor_parallel_size > 1
        return self.tensor_parallel_size, spread, self.enable_eplb, self.data_parallel_size

    @property
    def eplb(self) -> EPLBConfig:
        return self.eplb_config or EPLBConfig()

    @property
    def redundant_experts(self) -> int | None:
        """Number of redundant experts of each layer; None if experts do not move."""
        return self.eplb.num_redundant_experts if self.enable_eplb else None

    def check(self) -> None:
        super().check()
        check_limits(self, {"at least 1": "data_parallel_size"})
        self._check_data_parallel()
        if self.kv_events_config is not None and self.kv_events_config.publishes:
            self.kv_events_config.check_engines(self.data_parallel_size)
        set_section(self, "eplb_config", EPLBConfig)
        several = self.enable_expert_parallel and self.tensor_parallel_size * self.data_parallel_size > 1
        if self.enable_eplb and not several:
            raise ConfigError("enable_eplb", True, "false without enable_expert_parallel on at least two ranks")

    def _check_data_parallel(self) -> None:
        if self.data_parallel_size == 1:
            if self.all2all_backend != "auto":
                limit = "auto without data_parallel_size above 1, because all ranks of an engine have all of its tokens"
                raise ConfigError("all2all_backend", self.all2all_backend, limit)
            return
        if not self.enable_expert_parallel:
            limit = "1 without enable_expert_parallel; for independent engines, use replicas instead"
            raise ConfigError("data_parallel_size", self.data_parallel_size, limit)
        if self.pipeline_parallel_size > 1 and self.enable_eplb:
            several = "both data_parallel_size and pipeline_parallel_size above 1"
            limit = f"false with {several}, because only the first stage reports the load of its experts"
            raise ConfigError("enable_eplb", True, limit)
