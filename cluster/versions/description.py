"""What another version has to know of this one, with a configuration, before the two meet in one cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from cluster.config.app_config import AppConfig
from cluster.distribution import version_and_commit
from cluster.fingerprint import KV_OPTIONS
from cluster.model_info import model_info
from cluster.serve_config import check_serve_config, load, ours
from cluster.versions.borders import forms, roots
from cluster.versions.record_form import RecordForm
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv_transfer.fingerprint import LAYOUT_VERSION
from engine.parts.tape.snapshot import KINDS
from engine.source_digest import numerics_digest


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    fingerprint: str
    """`system_fingerprint` of its answers."""
    kv: dict[str, dict[str, str]]
    """For each pool, what the bits of its KV depend on. Two engines exchange KV only if all of it is equal."""


class VersionDescription(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    """Version and commit of Manta."""
    models: dict[str, ModelDescription]
    tapes: str
    """Digest of what a scheduler's state consists of. `manta replay` needs an equal one."""
    records: dict[str, RecordForm]
    """Forms of all records that cross a border between processes or versions, by name."""
    roots: list[str]
    """Names of those that do so by themselves."""


def described(path: Path) -> VersionDescription:
    """Return the description of this version with a serve_config.yaml, or the one that another version has written to a
    file. Raises StartupError."""
    if path.suffix == ".json":
        return _read(path)
    serve_config = load(path)
    check_serve_config(serve_config)
    return VersionDescription(
        version=version_and_commit(),
        models=dict(_models(serve_config)),
        tapes=KINDS.schema.hex(),
        records=forms(),
        roots=roots(),
    )


def _read(path: Path) -> VersionDescription:
    try:
        return msgspec.json.decode(path.read_bytes(), type=VersionDescription)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        raise ConfigError(str(path), problem, "a file written by `manta check FILE --describe`") from None


def _models(serve_config: dict[str, Any]) -> list[tuple[str, ModelDescription]]:
    found = []
    for _, application in ours(serve_config):
        config = AppConfig.of(application)
        for model in config.models:
            info = model_info(model, config.ingress)
            weights = "" if info.identity is None else info.identity.weights
            kv: dict[str, dict[str, str]] = {role: _kv(model.engine_config(role), weights) for role in model.pools}
            found.append((info.name, ModelDescription(fingerprint=info.fingerprint or "", kv=kv)))
    return found


def _kv(config: EngineConfig, weights: str) -> dict[str, str]:
    options = {name: str(getattr(config, name)) for name in KV_OPTIONS}
    return {"weights": weights, "numerics": numerics_digest(), "layout": str(LAYOUT_VERSION), **options}
