"""What a snapshot of a scheduler has of the check of cached KV."""

from __future__ import annotations

from typing import Any

from engine.parts.kv_check.kv_check import KVCheck, SampledBlock
from engine.parts.snapshot_kinds import SnapshotKinds, Zeros


def _without_text(sampled: SampledBlock) -> dict[str, Any]:
    return {"tokens": Zeros(len(sampled.tokens)), "salt": ""}


KINDS = SnapshotKinds(objects=(KVCheck, SampledBlock), changes={SampledBlock: _without_text})
