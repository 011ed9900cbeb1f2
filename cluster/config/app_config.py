"""Section `args` of serve_config.yaml: one application."""

from __future__ import annotations

from typing import Any, get_args, get_origin

import pydantic
from pydantic import Field

from cluster.autoscaling.slo import POLICIES, POLICY
from cluster.config.ingress_section import IngressSection
from cluster.config.model_section import ModelSection
from cluster.config.section import Section, section_of
from deployments.http.validation import expected
from deployments.observability.tracing import TracingConfig
from deployments.options.console import ConsoleConfig
from engine.errors import ConfigError, without_credentials
from engine.offline.vllm_flags import RENAMED
from placement.console_log import LogConfig, LogFormat, LogLevel

TracingSection = section_of(TracingConfig, without=set())


FORMER_KEYS = {**RENAMED, "cors_origins": "allowed_origins"}


class AppConfig(Section):
    """One application."""

    models: list[ModelSection] = Field(min_length=1)  #: models, each with its pools
    ingress: IngressSection = IngressSection()  #: the HTTP API
    log_format: LogFormat = "text"  #: `json` writes one object per line
    log_level: LogLevel = "info"  #: `debug` also logs each stage of every request
    tracing: TracingSection | None = None  # type: ignore[valid-type]  #: OpenTelemetry, which needs the extra `otel`

    @property
    def log(self) -> LogConfig:
        return LogConfig(format=self.log_format, level=self.log_level)

    def tracing_config(self) -> TracingConfig | None:
        return None if self.tracing is None else TracingConfig(**dict(self.tracing))

    def console_config(self) -> ConsoleConfig:
        """Return the configuration as the console shows it: every key with the value in force, without API keys and
        passwords."""
        above = self.model_dump(mode="json", exclude={"models": True, "ingress": {"api_keys"}})
        above["ingress"]["api_keys"] = f"{len(self.ingress.api_keys)} keys"
        shown = {"models": [model.shown() for model in self.models], **above}
        return ConsoleConfig(
            enabled=self.ingress.console,
            texts=self.ingress.console_texts,
            currency=self.ingress.currency,
            configuration=without_credentials(shown),
        )

    @classmethod
    def of(cls, application: dict[str, Any]) -> AppConfig:
        """Parse an application of a Serve configuration, including its autoscaling policy, which is outside `args`.
        Raises like `parse`."""
        config = cls.parse(application.get("args") or {})
        policy = (application.get("autoscaling_policy") or {}).get("policy_function")
        if config.autoscales and policy not in POLICIES:
            limit = f"{POLICY}, next to `args`, because a pool has max_replicas or roles change"
            raise ConfigError("autoscaling_policy.policy_function", policy, limit)
        return config

    @property
    def autoscales(self) -> bool:
        return any(model.autoscales for model in self.models)

    @classmethod
    def parse(cls, args: dict[str, Any]) -> AppConfig:
        """Parse `args`. Raises ConfigError with the path of the key, and StartupError for a missing extra."""
        try:
            config = cls.model_validate(args)
        except pydantic.ValidationError as error:
            raise _first_problem(error) from None
        names: list[str] = []
        for i, model in enumerate(config.models):
            model.check(f"models[{i}]")
            for name in (model.name, *model.aliases, *(module.name for module in model.lora_modules)):
                if name in names:
                    raise ConfigError(f"models[{i}].name", name, "different from all other names")
                names.append(name)
        if (tracing := config.tracing_config()) is not None:
            tracing.check_installed()
        config.ingress.store_config()
        config.ingress.image_config()
        config.ingress.check_limits(config.models)
        return config


def _first_problem(error: pydantic.ValidationError) -> ConfigError:
    problem = error.errors(include_url=False)[0]
    path = _path(problem["loc"])
    match problem["type"]:
        case "extra_forbidden" if (renamed := FORMER_KEYS.get(str(problem["loc"][-1]))) is not None:
            return ConfigError(path, problem["input"], f"written {renamed}")
        case "extra_forbidden":
            known = ", ".join(_known_keys(problem["loc"][:-1]))
            return ConfigError(path, problem["loc"][-1], f"one of the known keys ({known})")
        case "missing":
            return ConfigError(path, None, "given")
        case _:
            return ConfigError(path, problem["input"], expected(problem["msg"]))


def _path(location: tuple[int | str, ...]) -> str:
    """Return a location in the form models[0].engine.block_size."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    section: Any = AppConfig
    is_name = False  # of an entry of a mapping
    for part in location:
        if isinstance(part, str) and not is_name:
            annotation = section.model_fields[part].annotation
            is_name = get_origin(annotation) is dict
            section = next(iter(get_args(annotation)[is_name:]), annotation)
        else:
            is_name = False
    return list(section.model_fields)
