"""`manta models` and `manta check MODEL`: architectures that run, the code that runs them, and how each is tested."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from engine.model.checkpoint.resolve import resolve_config
from engine.model.config import ModelConfig
from engine.model.families.encoders import ENCODERS
from engine.model.families.family import families
from engine.model.families.multimodal import TEXT_PARTS
from engine.model.families.transformers_family import ONE_RANK, TRANSFORMERS

ONE_RANK_TESTS = "logits, greedy tokens, chunks, batches, cached prefixes"
TWO_RANKS_TESTS = f"{ONE_RANK_TESTS}; 2 ranks"
NATIVE_TESTS = f"{ONE_RANK_TESTS}; preemption, 2 and 4 ranks, graphs, quantized weights"
LATENT_TESTS = f"{ONE_RANK_TESTS}; preemption, 2 and 4 ranks, quantized weights"
HYBRID_TESTS = f"{ONE_RANK_TESTS}, preemption; 2 ranks"


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
    for name, family in families().items():
        tests = LATENT_TESTS if family.model.startswith("deepseek.") else NATIVE_TESTS
        yield Architecture(name, "", "native", HYBRID_TESTS if "recurrent" in family.defaults else tests)
    for name, (texts, _) in TEXT_PARTS.items():
        yield Architecture(name, f"text part, as {', '.join(texts.values())}", "native", TWO_RANKS_TESTS)
    for name in ENCODERS:
        yield Architecture(name, "", "native", "embeddings and scores")
    for name, models in sorted(TRANSFORMERS.items()):
        tested = ONE_RANK_TESTS if name in ONE_RANK else TWO_RANKS_TESTS
        yield Architecture(name, models, "transformers", tested)


def markdown() -> str:
    """Return the table of docs/models.md."""
    groups = defaultdict[tuple[str, str], list[str]](list)
    for a in architectures():
        groups[a.path, a.tested].append(f"`{a.name}` ({a.models})" if a.models else f"`{a.name}`")
    rows = [f"| {', '.join(names)} | {path} | {tested} |" for (path, tested), names in groups.items()]
    return "\n".join(["| architectures | code | compared with transformers |", "| --- | --- | --- |", *rows])


def check_model(model: str, tensor_parallel_size: int) -> str:
    """Return one line that says which code runs a model. Raises StartupError with the reason if none does.

    Downloads only config.json and other small files.
    """
    config = ModelConfig.from_folder(resolve_config(model))
    config.kv_heads_per_rank(tensor_parallel_size)
    if not config.transformers:
        return f"{model} runs on Manta's native code for {config.architecture}"
    from engine.distributed.tp_group import TPGroup
    from engine.model.shard import ShardPlan
    from engine.model.transformers_backend.model import find_calls  # torch and transformers take seconds

    find_calls(config, ShardPlan(TPGroup(0, tensor_parallel_size)))
    tested = "" if config.architecture in TRANSFORMERS else "; no test covers this architecture"
    return f"{model} runs on transformers' own code for {config.architecture} over Manta's attention{tested}"
