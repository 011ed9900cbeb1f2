"""Options of tiers below the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config_options import check_limits, option
from engine.engine_options import EngineOptions
from engine.errors import ConfigError

LIMITS = {
    "above 0": "kv_offloading_size kv_offloading_disk_size kv_offloading_store_size kv_offloading_ttl_s "
    "kv_offloading_timeout_s"
}


@dataclass(frozen=True, kw_only=True)
class TierOptions(EngineOptions):
    kv_offloading_size: float | None = option(
        None, "GiB of host memory, over all ranks, for KV blocks that the device may evict (docs/kv_offloading.md)."
    )
    kv_offloading_disk_size: float | None = option(
        None, "GiB of local disk, over all ranks, for KV blocks. The blocks are encrypted."
    )
    kv_offloading_dir: str = option(
        "~/.cache/manta/kv", "Folder of the blocks on disk. Engines of one machine may share it."
    )
    kv_offloading_store: str | None = option(
        None,
        "Folder or object store for KV blocks that all engines with this model and key share, as a path or as a URL of "
        "fsspec such as s3://bucket/kv. The blocks are encrypted.",
    )
    kv_offloading_store_size: float | None = option(
        None, "GiB in the store, over all ranks, for the blocks of this model and setup."
    )
    kv_offloading_key_file: str | None = option(
        None,
        "File of at least 32 random bytes with which blocks on disk and in the store are encrypted. Blocks survive a "
        "restart only if their key does: the default key is lost with the cluster, or with an engine that has no "
        "cluster.",
    )
    kv_offloading_ttl_s: float | None = option(
        None, "Seconds after which a block is deleted from the tiers, even if it is used. Default: never."
    )
    kv_offloading_timeout_s: float = option(
        2.0, "Seconds that a request waits for KV from a tier. After this time, the KV is computed instead."
    )

    @property
    def offloads_kv(self) -> bool:
        """Whether there are tiers below the KV cache."""
        sizes = self.kv_offloading_size, self.kv_offloading_disk_size, self.kv_offloading_store_size
        return any(size is not None for size in sizes)

    def check(self) -> None:
        super().check()
        check_limits(self, LIMITS)
        if self.offloads_kv and not self.enable_prefix_caching:
            limit = "true with tiers (kv_offloading_*), because the prefix cache finds the blocks"
            raise ConfigError("enable_prefix_caching", False, limit)
        if (self.kv_offloading_store is None) != (self.kv_offloading_store_size is None):
            given, missing = "kv_offloading_store", "kv_offloading_store_size"
            if self.kv_offloading_store is None:
                given, missing = missing, given
            raise ConfigError(missing, None, f"set, because {given} is")
        if self.kv_offloading_key_file is not None and not (self.kv_offloading_disk_size or self.kv_offloading_store):
            limit = "left out without a disk or store, because only blocks there are encrypted"
            raise ConfigError("kv_offloading_key_file", self.kv_offloading_key_file, limit)
