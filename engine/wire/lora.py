"""An adapter as requests name it."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from engine.wire.part_record import PartRecord


class LoRARequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A low-rank adapter (LoRA, arXiv:2106.09685) in PEFT's format. Two adapters are the same if their digests are
    equal."""

    lora_name: str
    """The adapter's name for clients; it does not affect the result."""
    lora_int_id: int = 0
    """vLLM's number of the adapter; it has no effect."""
    lora_path: str = ""
    """Folder or Hub id."""
    digest: str = ""
    """`AdapterFiles.digest`: hash of everything that affects the adapter's results. If it is empty, an engine without a
    cluster reads it from the files."""


class AdapterLoad(PartRecord, frozen=True, array_like=True):
    """Asks each rank to read an adapter into host memory, and to copy it into a slot that no sequence uses."""

    part: ClassVar[str] = "lora"

    number: int
    """Counts from 1; answers name it."""
    lora: LoRARequest
    slot: int = -1
    """Slot to fill; -1 to read the adapter into host memory only."""


class AdapterAnswer(PartRecord, frozen=True, array_like=True):
    """The result of an AdapterLoad on one rank."""

    part: ClassVar[str] = "lora"

    number: int
    error: str = ""
    """Why it failed; empty if it succeeded."""


def digest_of(lora: LoRARequest | None) -> str:
    """Return the digest of an adapter, empty for none."""
    return "" if lora is None else lora.digest
