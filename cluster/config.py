"""`args` of serve_config.yaml: parsed strictly, then turned into the frozen objects that each folder owns."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args, get_type_hints

import pydantic
from pydantic import BaseModel, ConfigDict, Field, create_model

from engine.config import EngineConfig
from engine.errors import ConfigError
from placement.spec import GroupSpec, Strategy


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


# One key per field of EngineConfig, so that the two cannot drift apart. `model` stands one level higher.
_HINTS = get_type_hints(EngineConfig)
EngineSection = create_model(
    "EngineSection",
    __base__=Section,
    **{f.name: (_HINTS[f.name], f.default) for f in fields(EngineConfig) if f.name != "model"},  # type: ignore[call-overload]
)


class DecodeSection(Section):
    """The replicas that run a model.

    num_replicas: fixed; or min_replicas and max_replicas, between which load decides.
    num_cpus, num_gpus: of each rank of a replica; num_cpus is also its threads, unless `engine.num_threads` says more.
        A replica has `engine.tensor_parallel` ranks, and a rank uses one GPU at most.
    accelerator_type, label_selector: what a rank's node must have (`L4`; `{pool: decode}`).
    placement_strategy: Ray's. PACK takes as few nodes as it can, STRICT_PACK one, STRICT_SPREAD one per rank.
    max_ongoing_requests: sequences that one replica takes; None means all that its engine may run and queue.
    target_ongoing_requests: per replica, what autoscaling aims at; None means half of what runs at once.
    stall_timeout_s: a replica whose engine ends no step for so long while work is queued is replaced. Longer than any
        of its steps: a large model on a CPU may need a minute for `max_num_batched_tokens` of a prompt.
    drain_s: how long a replica that is to stop may go on with its requests.
    """

    num_replicas: int = Field(default=1, ge=1)
    min_replicas: int | None = Field(default=None, ge=1)
    max_replicas: int | None = Field(default=None, ge=1)
    num_cpus: float = Field(default=1.0, ge=0)
    num_gpus: float = Field(default=0.0, ge=0, le=1)
    accelerator_type: str | None = Field(default=None, min_length=1)
    label_selector: dict[str, str] = Field(default_factory=dict)
    placement_strategy: Strategy = "PACK"
    max_ongoing_requests: int | None = Field(default=None, ge=1)
    target_ongoing_requests: float | None = Field(default=None, gt=0)
    startup_timeout_s: float = Field(default=600.0, gt=0)
    stall_timeout_s: float = Field(default=10.0, gt=0)
    drain_s: float = Field(default=60.0, ge=0)


class IngressSection(Section):
    """request_timeout_s: a request that takes longer is ended with an error, wherever it is."""

    num_replicas: int = Field(default=1, ge=1)
    num_cpus: float = Field(default=0.1, ge=0)
    max_ongoing_requests: int = Field(default=4096, ge=1)
    request_timeout_s: float = Field(default=600.0, gt=0)
    drain_s: float = Field(default=60.0, ge=0)


class ModelSection(Section):
    """name: under which the API serves it. model: `pocket`, a folder, or a Hub id."""

    name: str = Field(min_length=1)
    model: str
    engine: EngineSection = EngineSection()  # type: ignore[valid-type]  # mypy cannot see into create_model
    decode: DecodeSection = DecodeSection()

    def check(self, path: str) -> None:
        """Raises ConfigError for keys that do not go together; `path` is where this section stands."""
        try:
            self.engine_config()
        except ConfigError as error:
            key, value, limit = error.args
            raise ConfigError(f"{path}.engine.{key}", value, limit) from None
        low, high = self.decode.min_replicas, self.decode.max_replicas
        if low is not None and (high is None or high < low):
            raise ConfigError(f"{path}.decode.max_replicas", high, f"at least min_replicas ({low})")
        if not self.decode.num_cpus and not self.decode.num_gpus:
            raise ConfigError(f"{path}.decode.num_cpus", 0, "above 0 where num_gpus is 0")

    def engine_config(self) -> EngineConfig:
        return EngineConfig(model=self.model, **dict(self.engine))

    def group_spec(self) -> GroupSpec:
        return GroupSpec(
            num_cpus=self.decode.num_cpus,
            num_gpus=self.decode.num_gpus,
            num_ranks=self.engine_config().tensor_parallel,
            accelerator_type=self.decode.accelerator_type,
            label_selector=self.decode.label_selector,
            strategy=self.decode.placement_strategy,
            startup_timeout_s=self.decode.startup_timeout_s,
            stall_timeout_s=self.decode.stall_timeout_s,
        )


class AppConfig(Section):
    """All that one application serves."""

    models: list[ModelSection] = Field(min_length=1)
    ingress: IngressSection = IngressSection()

    @classmethod
    def parse(cls, args: dict[str, Any]) -> AppConfig:
        """Raises ConfigError that names the key by its path."""
        try:
            config = cls.model_validate(args)
        except pydantic.ValidationError as error:
            raise _first_problem(error) from None
        for i, model in enumerate(config.models):
            model.check(f"models[{i}]")
            if model.name in [other.name for other in config.models[:i]]:
                raise ConfigError(f"models[{i}].name", model.name, "different from all other names")
        return config


def _first_problem(error: pydantic.ValidationError) -> ConfigError:
    problem = error.errors(include_url=False)[0]
    path = _path(problem["loc"])
    match problem["type"]:
        case "extra_forbidden":
            known = ", ".join(_known_keys(problem["loc"][:-1]))
            return ConfigError(path, problem["loc"][-1], f"one of the known keys ({known})")
        case "missing":
            return ConfigError(path, None, "given")
        case _:
            return ConfigError(path, problem["input"], problem["msg"].replace("Input should be ", ""))


def _path(location: tuple[int | str, ...]) -> str:
    """For instance models[0].engine.block_size"""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    """Keys of the section at `location`."""
    section: Any = AppConfig
    for part in location:
        if isinstance(part, str):
            annotation = section.model_fields[part].annotation
            section = next(iter(get_args(annotation)), annotation)
    return list(section.model_fields)
