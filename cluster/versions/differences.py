"""What two versions that meet in one cluster do not have in common, and what follows for requests and files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cluster.fingerprint import differing_parts
from cluster.versions.breaks import find_breaks
from cluster.versions.description import ModelDescription, VersionDescription


@dataclass(frozen=True, slots=True)
class Differences:
    lines: list[str]
    """What is told of them."""
    breaks: list[str]
    """What one version could not read of the other: if there is any, they must not share a cluster or a store."""


def compare(old: VersionDescription, new: VersionDescription) -> Differences:
    lines = [f"{old.version} -> {new.version}"]
    for name in sorted(old.models.keys() | new.models.keys()):
        lines += _of_model(name, old.models.get(name), new.models.get(name))
    if old.tapes != new.tapes:
        lines.append("tapes: `manta replay` refuses those of the other version, since schedulers keep other state")
    breaks = find_breaks(old.records, new.records, old.roots)
    told = [f"records: not readable: {line}" for line in breaks]
    return Differences([*lines, *(told or ["records: each reads what the other sends and stores"])], breaks)


def _of_model(name: str, old: ModelDescription | None, new: ModelDescription | None) -> Iterator[str]:
    if old is None or new is None:
        yield f"model {name}: only the {'new' if old is None else 'old'} version serves it"
        return
    if old == new:
        yield f"model {name}: all digests are equal"
    if parts := differing_parts(old.fingerprint, new.fingerprint):
        yield (
            f"model {name}: system_fingerprint differs in {', '.join(parts)}: an interrupted answer with an "
            "Idempotency-Key gets 409 answer_not_reproducible from the other version"
        )
    for pool in sorted(old.kv.keys() | new.kv.keys()):
        before, after = old.kv.get(pool), new.kv.get(pool)
        if before is None or after is None:
            yield f"model {name}: only the {'new' if before is None else 'old'} version has the pool {pool}"
        elif differing := [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]:
            yield (
                f"model {name}: KV of {pool} differs in {', '.join(differing)}: running texts are replayed from the "
                "token that they have reached, and new replicas compute held and cached prompts again"
            )
