"""Adapters of requests."""

from __future__ import annotations

from typing import ClassVar, Self

import msgspec

from engine.wire.messages import Command, Notice
from engine.wire.part_record import PartRecord
from engine.wire.token_delta import ErrorInfo


class LoRARequest(PartRecord, frozen=True, omit_defaults=True):
    """A low-rank adapter (LoRA, arXiv:2106.09685) in PEFT's format. Two adapters are the same if their digests are
    equal."""

    part: ClassVar[str] = "lora"

    lora_name: str
    """The adapter's name for clients; it does not affect the result."""
    lora_int_id: int = 0
    """vLLM's number of the adapter; it has no effect."""
    lora_path: str = ""
    """Folder or Hub id."""
    digest: str = ""
    """`AdapterFiles.digest`: hash of everything that affects the adapter's results. If it is empty, an engine without a
    cluster reads it from the files."""

    def without_text(self) -> Self:
        return msgspec.structs.replace(self, lora_int_id=0, lora_path="")


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


class AdapterStats(PartRecord, frozen=True):
    """The adapters of one engine."""

    part: ClassVar[str] = "lora"

    max_loras: int
    """Slots for adapters."""
    resident: list[str]
    """Digests of the adapters in slots."""
    running: list[str]
    """Names of the adapters of running requests, in order."""
    waiting: list[str]


class SequenceAdapter(PartRecord, frozen=True, array_like=True):
    """The adapter of a sequence."""

    part: ClassVar[str] = "lora"

    slot: int

    def decided(self) -> tuple[int, ...]:
        return (self.slot,)


class LoadAdapter(Command, frozen=True):
    """Check that an adapter fits the model, and read its weights into host memory on every rank. Answered by
    AdapterLoaded."""

    call_id: str
    lora: LoRARequest


class AdapterLoaded(Notice, frozen=True):
    """Says that a LoadAdapter command has ended."""

    call_id: str
    error: ErrorInfo | None = None
    """Why no request can be computed with the adapter."""


def digest_of(lora: LoRARequest | None) -> str:
    """Return the digest of an adapter, empty for none."""
    return "" if lora is None else lora.digest


def extra_keys(digest: str) -> tuple[str, ...]:
    """Return what the hashes of a sequence's KV blocks depend on besides its tokens and its salt, as `root_hash` takes
    it. digest: of its adapter, empty for none. A name would not suffice, since new weights under an old name give
    another KV."""
    return (digest,) if digest else ()
