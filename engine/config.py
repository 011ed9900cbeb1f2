"""How one engine runs. Frozen; values that are discovered later live elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.errors import ConfigError
from engine.kv_transfer.config import HandoffConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine; the names are vLLM's where the meaning is the same.

    model: `pocket` (bundled), a local Hugging Face model folder, or a Hub id.
    dtype: of weights and KV cache; `auto` takes the model's own.
    block_size: tokens per KV block.
    kv_cache_memory_gib: size of the KV cache; None means 1 GiB on a CPU, and on a GPU what is left of
        `gpu_memory_utilization` after a profiling run.
    num_blocks: KV blocks, in place of a size in memory.
    max_model_len: longest prompt + answer, in tokens; None takes the model's own context.
    max_num_batched_tokens, max_num_seqs: tokens and sequences that one step may compute.
    max_waiting: requests that may queue before new ones are refused with Overloaded.
    overlap: plan step n+1 while step n computes; False is the plain loop. None means True on a GPU, where planning
        hides behind the device, and False on a CPU, where both want the same cores (docs/performance.md).
    num_threads: CPU threads of each rank; None means one per core that the process may use, shared out over the ranks
        of one machine.
    tensor_parallel: ranks that share the model, each with a part of every layer.
    handoff: for an engine that computes prompts for others, or has its prompts computed by others.
    """

    model: str = "pocket"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    block_size: int = 16
    kv_cache_memory_gib: float | None = None
    gpu_memory_utilization: float = 0.9
    num_blocks: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    max_waiting: int = 1024
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    enable_prefix_caching: bool = True
    overlap: bool | None = None
    num_threads: int | None = None
    tensor_parallel: int = 1
    seed: int = 0
    handoff: HandoffConfig | None = None

    def __post_init__(self) -> None:
        for key in ("block_size", "max_num_batched_tokens", "max_num_seqs", "max_waiting", "tensor_parallel"):
            if getattr(self, key) < 1:
                raise ConfigError(key, getattr(self, key), "at least 1")
        for key in ("num_blocks", "max_model_len", "num_threads"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(key, value, "at least 1, or left out")
        if self.dtype not in DTYPES:
            raise ConfigError("dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ConfigError("scheduling_policy", self.scheduling_policy, "fcfs or priority")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError("gpu_memory_utilization", self.gpu_memory_utilization, "above 0 and at most 1")
        if self.kv_cache_memory_gib is not None and self.kv_cache_memory_gib <= 0:
            raise ConfigError("kv_cache_memory_gib", self.kv_cache_memory_gib, "above 0, or left out")
        if self.max_num_seqs > self.max_num_batched_tokens:
            limit = f"at least max_num_seqs ({self.max_num_seqs}), so that every sequence can decode in one step"
            raise ConfigError("max_num_batched_tokens", self.max_num_batched_tokens, limit)
