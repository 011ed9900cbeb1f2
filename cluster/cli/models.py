"""`manta models` and `manta check MODEL`: architectures that run, the code that runs them, and how each is tested."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from cluster.cli.model_support import compared, support, support_by_name, well_known
from engine.model.checkpoint.resolve import resolve_config
from engine.model.config import ModelConfig
from engine.model.families.encoders import ENCODERS
from engine.model.families.family import families
from engine.model.families.multimodal import TEXT_PARTS
from engine.model.families.transformers_family import TRANSFORMERS


@dataclass(frozen=True, slots=True)
class Architecture:
    name: str
    """Name of the architecture in config.json."""
    models: str
    """Models with this architecture, if its name does not tell."""
    path: Literal["native", "transformers"]
    """Code that computes it, on top of Manta's attention."""
    tested: str
    """Outputs that tests compare with transformers'."""


def architectures() -> Iterator[Architecture]:
    """Yield every architecture that tests cover, native ones first."""
    of = compared().of
    for name in families():
        yield Architecture(name, "", "native", of(name))
    for name, (texts, _) in TEXT_PARTS.items():
        parts = sorted(set(texts.values()))
        tested = of(name) or "what is compared of its text part's architecture"
        yield Architecture(name, f"text part, as {', '.join(parts)}", "native", tested)
    for name in ENCODERS:
        yield Architecture(name, "", "native", of(name))
    for name, models in sorted(TRANSFORMERS.items()):
        yield Architecture(name, models, "transformers", of(name))


def markdown() -> str:
    """Return the table of docs/models.md."""
    groups = defaultdict[tuple[str, str], list[str]](list)
    for a in architectures():
        groups[a.path, a.tested].append(f"`{a.name}` ({a.models})" if a.models else f"`{a.name}`")
    rows = [f"| {', '.join(names)} | {path} | {tested} |" for (path, tested), names in groups.items()]
    header = f"| architectures | code | compared with transformers {compared().transformers} |"
    return "\n".join([header, "| --- | --- | --- |", *rows])


def well_known_markdown() -> str:
    """Return the table of docs/well_known_models.md."""
    rows = [f"| {name} | {support_by_name(*architectures)} |" for name, *architectures in well_known().models]
    return "\n".join(["| model | what runs it |", "| --- | --- |", *rows])


def check_model(model: str, tensor_parallel_size: int) -> str:
    """Return one line that says which code runs a model. Raises StartupError with the reason if none does.

    Downloads only config.json and other small files.
    """
    config = ModelConfig.from_folder(resolve_config(model))
    config.kv_heads_per_rank(tensor_parallel_size)
    if not config.transformers:
        return f"{model} {support(config.architecture, native=True)}"
    from engine.distributed.tp_group import TPGroup
    from engine.model.shard import ShardPlan
    from engine.model.transformers_backend.model import find_calls  # torch and transformers take seconds

    find_calls(config, ShardPlan(TPGroup(0, tensor_parallel_size)))
    return f"{model} {support(config.architecture, native=False)}"
