"""Messages that move KV blocks between the device and the tiers below it: commands from rank 0 to every rank, and the
ranks' answers."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import msgspec

from engine.wire.part_record import PartRecord


class TierBlock(NamedTuple):
    """A block on the device, and its copy in the tiers."""

    group: int
    """KV cache group; snapshots of recurrent states are the last."""
    block: int
    name: bytes
    """16 bytes, the same on all ranks."""
    slot: int = -1
    """Slot of the copy in host memory; -1 if the command does not use host memory."""
    on_disk: bool = False
    """Whether the copy on disk is written or read."""
    in_store: bool = False
    """The same for the copy in the store that engines share."""


class TierMessage(PartRecord, frozen=True):
    part: ClassVar[str] = "kv_tiers"


class StoreBlocks(TierMessage, frozen=True, array_like=True, tag=True):
    """Asks each rank to copy blocks into its tiers. The blocks stay unchanged until every rank has answered
    `copied`."""

    number: int
    """Counts from 1 over all commands; answers name it."""
    blocks: list[TierBlock]


class LoadBlocks(TierMessage, frozen=True, array_like=True, tag=True):
    """Asks each rank to fill blocks from its tiers. Nothing else reads or writes these blocks until every rank has
    answered."""

    number: int
    blocks: list[TierBlock]


class StopLoad(TierMessage, frozen=True, array_like=True, tag=True):
    """Asks each rank to end a LoadBlocks at once. After its answer, a rank writes no more of the blocks."""

    number: int


class DropBlocks(TierMessage, frozen=True, array_like=True, tag=True):
    """Asks each rank to delete blocks from its disk, or rank 0 to delete them from the store; not answered."""

    names: list[bytes]
    in_store: bool = False


TierCommand = StoreBlocks | LoadBlocks | StopLoad | DropBlocks


class TierAnswer(TierMessage, frozen=True, array_like=True):
    """One rank's answer to a command. A StoreBlocks gets two answers: when its blocks are copied, and when all is
    written."""

    number: int
    copied: bool = False
    """Whether this is the first of a StoreBlocks command's two answers."""
    failed: list[int] = msgspec.field(default_factory=list)
    """Indices of the blocks that were not written."""
    is_unreachable: bool = False
    """Whether they failed because the store could not be reached, so that it may still have them."""


class FoundBlock(NamedTuple):
    """A block that is in a tier although this start of the engine has not written it."""

    name: bytes
    size: int
    """Bytes on all ranks together."""
    age_s: float


class StoreListing(msgspec.Struct, frozen=True):
    """What has changed in the store since the last listing, as rank 0 sees it."""

    added: list[FoundBlock]
    """Oldest first."""
    removed: list[bytes]


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """State of one tier, and its totals since the start, over all ranks."""

    used_bytes: int
    total_bytes: int
    blocks: int
    """Blocks that can be loaded."""
    read_bytes: int
    write_bytes: int
    read_s: float
    write_s: float
    errors: dict[str, int]
    """Blocks that could not be moved: `read` (missing, corrupt), `write` (full disk), `deadline`; `different` for one
    that was wrong, after which the tier is not used."""
    gib_s: dict[str, float] = {}
    """GiB times the seconds for which they were kept: `holds`, as far as holds kept them, and `cache`."""


class KVOffloadStats(PartRecord, frozen=True, kw_only=True):
    """The tiers below the KV cache of one engine."""

    part: ClassVar[str] = "kv_tiers"

    tiers: dict[str, TierStats] = msgspec.field(default_factory=dict)
    """The tiers `host`, `disk` and `store`, as far as the engine has them."""
    loading: int = 0
    """Requests that wait for blocks."""
    queried_tokens: int = 0
    """Prompt tokens that the device's prefix cache lacked."""
    hit_tokens: int = 0
    """Of these, tokens whose KV came from a tier."""
    not_stored: int = 0
    """Blocks that were evicted from the device before their turn to be copied."""
