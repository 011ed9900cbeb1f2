"""Options of a pool of replicas."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from cluster.config.section import Section, section_of
from deployments.routing.config import RoutingConfig
from engine.config import EngineConfig
from engine.errors import ConfigError
from placement.spec import Strategy

# model and handoff are one level higher; EngineConfig reads the JSON objects itself
JSON_OBJECTS = dict.fromkeys(
    ("speculative_config", "kv_events_config", "eplb_config", "structured_outputs_config"), dict[str, Any] | None
)
EngineSection = section_of(EngineConfig, without={"model", "handoff", "encode"}, **JSON_OBJECTS)
RoutingSection = section_of(RoutingConfig, without=set())


class PoolSection(Section):
    """Replicas that run a model, or replicas that compute prompts or images for them."""

    engine: EngineSection = EngineSection()  # type: ignore[valid-type]  # mypy cannot see into create_model
    """Keys that override the model's `engine` section in this pool."""
    routing: RoutingSection = RoutingSection()  # type: ignore[valid-type]
    """Choice of a replica for a request, or for a prompt (docs/routing.md)."""
    num_replicas: int = Field(default=1, ge=1)  #: fixed number; for autoscaling, set the next two instead
    min_replicas: int | None = Field(default=None, ge=0)  #: default 1 with max_replicas; 0 scales to zero
    max_replicas: int | None = Field(default=None, ge=1)  #: turns autoscaling on
    upscale_delay_s: float = Field(default=3.0, ge=0)  #: time for which more replicas must be desired continuously
    downscale_delay_s: float = Field(default=300.0, ge=0)  #: time for which fewer replicas must be desired continuously
    scale_to_zero_delay_s: float = Field(default=600.0, ge=0)  #: time without work, if min_replicas is 0
    num_cpus: float = Field(default=1.0, ge=0)  #: CPUs reserved for each rank; `engine.num_threads` compute
    num_gpus: float = Field(
        default=0.0, ge=0, le=1
    )  #: GPUs of each of `tensor_parallel_size` x `pipeline_parallel_size` ranks
    accelerator_type: str | None = Field(default=None, min_length=1)  #: GPU that a rank's node must have: `L4`
    label_selector: dict[str, str] = Field(default_factory=dict)  #: labels that a rank's node must have
    placement_strategy: Strategy = "PACK"  #: Ray's: PACK: few nodes; STRICT_PACK: one; STRICT_SPREAD: one per rank
    max_ongoing_requests: int | None = Field(default=None, ge=1)
    """Maximum number of sequences in one replica; None for the number that its engine may run and queue."""
    startup_timeout_s: float = Field(default=600.0, gt=0)  #: limit for starting the ranks and loading the weights
    stall_timeout_s: float = Field(default=10.0, gt=0)
    """Time after which a replica with queued work is replaced if its engine ends no step. It must exceed the time of
    any step: a large model on a CPU may need a minute for `max_num_batched_tokens` of a prompt."""
    drain_s: float = Field(default=60.0, ge=0)  #: time for which a stopping replica may continue its requests

    @property
    def bounds(self) -> tuple[int, int]:
        """Minimum and maximum number of replicas."""
        if self.max_replicas is None:
            return self.num_replicas, self.num_replicas
        return 1 if self.min_replicas is None else self.min_replicas, self.max_replicas

    def check(self, path: str) -> None:
        """Raise ConfigError for contradictory keys."""
        low, high = self.min_replicas, self.max_replicas
        if low is not None and (high is None or high < low):
            raise ConfigError(f"{path}.max_replicas", high, f"at least min_replicas ({low})")
        if high is not None and "num_replicas" in self.model_fields_set:
            raise ConfigError(f"{path}.num_replicas", self.num_replicas, "left out if max_replicas is given")
        if not self.num_cpus and not self.num_gpus:
            raise ConfigError(f"{path}.num_cpus", 0, "above 0 if num_gpus is 0")
        try:
            self.routing_config()
        except ConfigError as error:
            key, value, limit = error.args
            raise ConfigError(f"{path}.{key}", value, limit) from None

    def routing_config(self) -> RoutingConfig:
        return RoutingConfig(**dict(self.routing))
