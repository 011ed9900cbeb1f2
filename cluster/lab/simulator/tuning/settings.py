"""Options of a simulated cluster that can be changed, by their names in serve_config.yaml."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from cluster.config.simulation_options import HandoffPolicy, RouterName
from cluster.lab.simulator.spec import ClusterSpec
from deployments.routing.config import RoutingConfig
from engine.errors import InvalidParameter

DEFAULT_ROUTER = RoutingConfig().policy


@dataclass(frozen=True, slots=True)
class Setting:
    path: str  #: of its key, from a model's section in serve_config.yaml
    field: str  #: of a ClusterSpec, or of its `engine`
    parse: Callable[[str], Any]  #: raises ValueError
    limit: str  #: what values may be
    of_engine: bool = False

    def get(self, spec: ClusterSpec) -> Any:
        return getattr(spec.engine if self.of_engine else spec, self.field)


def _whole(path: str, field: str, least: int = 1, *, of_engine: bool = False) -> Setting:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ValueError(text)
        return int(text)

    return Setting(path, field, parse, f"a whole number, {least} or more", of_engine)


def _one_of(path: str, field: str, choices: Mapping[str, Any], *, of_engine: bool = False) -> Setting:
    def parse(text: str) -> Any:
        if text not in choices:
            raise ValueError(text)
        return choices[text]

    return Setting(path, field, parse, f"one of {', '.join(choices)}", of_engine)


def _names(literal: Any) -> dict[str, str]:
    return {name: name for name in get_args(literal)}


SETTINGS = {
    "max_num_seqs": _whole("engine.max_num_seqs", "max_num_seqs", of_engine=True),
    "max_num_batched_tokens": _whole("engine.max_num_batched_tokens", "max_num_batched_tokens", of_engine=True),
    "enable_prefix_caching": _one_of(
        "engine.enable_prefix_caching", "enable_prefix_caching", {"true": True, "false": False}, of_engine=True
    ),
    "num_gpu_blocks_override": _whole("engine.num_gpu_blocks_override", "num_blocks"),
    "decode.num_replicas": _whole("decode.num_replicas", "replicas"),
    "routing.policy": _one_of("decode.routing.policy", "router", _names(RouterName)),
    "prefill.num_replicas": _whole("prefill.num_replicas", "prefill_replicas", least=0),
    "handoff.policy": _one_of("handoff.policy", "handoff", _names(HandoffPolicy)),
}


def parse_setting(text: str, flag: str = "--set") -> tuple[str, Any]:
    """Return name and value of `NAME=VALUE`. Raises InvalidParameter. flag: for the message."""
    name, separator, value = text.partition("=")
    name = name.removeprefix("engine.")
    if not separator or name not in SETTINGS:
        raise InvalidParameter(flag, text, f"NAME=VALUE, where NAME is one of {', '.join(SETTINGS)}")
    try:
        return name, SETTINGS[name].parse(value)
    except ValueError:
        raise InvalidParameter(flag, text, SETTINGS[name].limit) from None


def with_settings(spec: ClusterSpec, values: Mapping[str, Any]) -> ClusterSpec:
    """Return the cluster with other values of these settings. Raises ConfigError if an engine cannot have them."""
    engine = {SETTINGS[name].field: value for name, value in values.items() if SETTINGS[name].of_engine}
    own = {SETTINGS[name].field: value for name, value in values.items() if not SETTINGS[name].of_engine}
    if "num_gpu_blocks_override" in values:
        own["max_model_len"] = min(spec.max_model_len, values["num_gpu_blocks_override"] * spec.engine.known_block_size)
    return replace(spec, engine=replace(spec.engine, **engine), **own)


def changes(before: ClusterSpec, after: ClusterSpec) -> dict[str, Any]:
    """Return the settings that differ, by name, with their values in `after`."""
    return {name: one.get(after) for name, one in SETTINGS.items() if one.get(before) != one.get(after)}


def to_yaml(before: ClusterSpec, after: ClusterSpec) -> str:
    """Return the settings that differ as keys of a model's section in serve_config.yaml."""
    keys = {SETTINGS[name].path: (SETTINGS[name].get(before), value) for name, value in changes(before, after).items()}
    if not after.prefill_replicas:
        keys = {path: each for path, each in keys.items() if not path.startswith(("prefill.", "handoff."))}
        if before.prefill_replicas:
            keys["prefill"] = before.prefill_replicas, None
    elif after.router != (before.router if before.prefill_replicas else DEFAULT_ROUTER):
        keys["prefill.routing.policy"] = before.router if before.prefill_replicas else None, after.router
    lines: list[str] = []
    written: set[str] = set()
    for path in sorted(keys):
        *sections, key = path.split(".")
        for depth, section in enumerate(sections):
            if (above := ".".join(sections[: depth + 1])) not in written:
                written.add(above)
                lines.append(f"{'  ' * depth}{section}:")
        was, value = keys[path]
        comment = "" if was is None else f"  # was {_text(was)}"
        lines.append(f"{'  ' * len(sections)}{key}: {_text(value)}{comment}")
    return "".join(f"{line}\n" for line in lines)


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
