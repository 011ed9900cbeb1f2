"""A Serve configuration file, as far as it can be judged without Ray."""

from __future__ import annotations

from pathlib import Path

import yaml

from cluster.config import AppConfig
from cluster.model_info import model_info
from cluster.serve_command import BUILDER
from engine.errors import ConfigError


def check(path: Path) -> list[str]:
    """Names of the models that a Serve configuration file would serve.

    Raises StartupError for whatever can be seen without loading weights or starting Ray.
    """
    configs = read(path)
    for config in configs:
        config.ingress.gate()
    return [model_info(model, config.ingress).name for config in configs for model in config.models]


def read(path: Path) -> list[AppConfig]:
    """Manta's applications in a Serve configuration file. Raises StartupError."""
    try:
        applications = yaml.safe_load(path.read_text())["applications"]
        ours = [app for app in applications if app["import_path"] == BUILDER]
    except (OSError, yaml.YAMLError, LookupError, TypeError) as error:
        raise ConfigError(str(path), f"{type(error).__name__}: {error}", "a Serve configuration file") from None
    return [AppConfig.of(app) for app in ours]
