"""How one engine runs. Frozen; values that are discovered later live elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
# tokens per KV block that every attention backend of such a device takes: for who must know before there is an engine
BLOCK_SIZES = {"cpu": 16, "cuda": 256}
# where nobody sets them; the fields' own defaults are for a CPU, which such steps would keep busy for seconds
GPU_DEFAULTS = {"max_num_batched_tokens": 8192, "max_num_seqs": 256}


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConfig:
    """role: `prefill` computes prompts for others, `decode` may have its prompts computed by others.
    transport: how blocks travel; `auto` takes the fastest that both sides have.
    policy: where a decode engine has prompts computed; `auto` weighs the cost of both places.
    lease_s: how long prefill holds the blocks of a handoff after the last sign of life of decode.
    heartbeat_s: how often decode gives one.
    progress_s: without an answer to heartbeats, or without a byte in a read, until the link counts as cut.
    accept_s: until a prefill engine must have taken a ticket.
    rest_s: how long a pair of engines rests after its link has failed.
    max_attempts: remote tries per request; then the prompt is computed locally.
    """

    role: Literal["prefill", "decode"]
    transport: Literal["auto", "tcp", "nixl", "nccl"] = "auto"
    policy: Literal["auto", "always", "never"] = "auto"
    lease_s: float = 10.0
    heartbeat_s: float = 1.0
    progress_s: float = 5.0
    accept_s: float = 5.0
    rest_s: float = 30.0
    max_attempts: int = 3

    def __post_init__(self) -> None:
        for key in ("lease_s", "heartbeat_s", "progress_s", "accept_s"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"handoff.{key}", getattr(self, key), "above 0")
        if self.lease_s < 3 * self.heartbeat_s:
            raise ConfigError("handoff.lease_s", self.lease_s, f"at least 3 heartbeats ({3 * self.heartbeat_s:g} s)")
        if self.max_attempts < 1:
            raise ConfigError("handoff.max_attempts", self.max_attempts, "at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine; the names are vLLM's where the meaning is the same.

    model: `pocket` (bundled), a local Hugging Face model folder, or a Hub id.
    dtype: of weights, activations and KV cache; `auto` takes the model's own. Quantized weights are what they are.
    quantization: `fp8` rounds the weights of a model that is not quantized to FP8 as they are loaded.
    kv_cache_dtype: `fp8` (the same as `fp8_e4m3`) stores K and V in one byte each; `auto` takes `dtype`.
    device: `auto` takes a GPU where torch finds one.
    block_size: tokens per KV block; None takes what the attention backend of the device likes, 16 on a CPU.
    kv_cache_memory_gib: size of the KV cache; None means 2 GiB on a CPU, and on a GPU what is left of
        `gpu_memory_utilization` after a profiling run.
    gpu_memory_utilization: share of a GPU's memory that weights, KV cache and activations may fill together.
    num_blocks: KV blocks, in place of a size in memory.
    enforce_eager: on a GPU, launch every kernel from the host also where a step only decodes: the plain twin of CUDA
        graphs, slower and with the same tokens.
    torch_compile: compile what stands between the attentions of a model with torch.compile as the engine starts
        (docs/gpu.md); not with `enforce_eager`.
    cuda_graph_memory_gib: GPU memory kept free for CUDA graphs; batch sizes that do not fit run without.
    load_format: `auto` reads the model's weights; `dummy` takes random ones of the same shapes, to measure.
    max_model_len: longest prompt + answer, in tokens; None takes the model's own context.
    max_num_batched_tokens: tokens that one step may compute, of all sequences together. Where nobody sets it, the
        offline `LLM` and pools with GPUs take 8192.
    max_num_seqs: sequences that run at a time. Where nobody sets it, the offline `LLM` and pools with GPUs take 256.
    max_waiting: requests that may queue before new ones are refused with Overloaded.
    scheduling_policy: `priority` looks at the priority of a request first, `fcfs` at its arrival only.
    enable_prefix_caching: keep the KV of what was computed, and take it for prompts that begin alike.
    overlap: plan step n+1 while step n computes; False is the plain loop. None means True on a GPU, where planning
        hides behind the device, and False on a CPU, where both want the same cores (docs/measurements/performance.md).
    num_threads: CPU threads of each rank; None means one per core that the process may use, shared out over the ranks
        of one machine.
    tensor_parallel: ranks that share the model, each with a part of every layer.
    seed: of requests that bring none, in the offline `LLM`; a server's depend on their ids.
    handoff: for an engine that computes prompts for others, or has its prompts computed by others.
    """

    model: str = "pocket"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["fp8"] | None = None
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    block_size: int | None = None
    kv_cache_memory_gib: float | None = None
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    torch_compile: bool = False
    cuda_graph_memory_gib: float = 1.0
    load_format: Literal["auto", "dummy"] = "auto"
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

    @property
    def known_block_size(self) -> int:
        """For who must know it without an engine. Raises AssertionError where the device is to choose it."""
        assert self.block_size is not None, "only an engine can choose it, on its device"
        return self.block_size

    @property
    def shared_block_size(self) -> int | None:
        """Of blocks that requests with a common prefix share; None where they share none."""
        return self.known_block_size if self.enable_prefix_caching else None

    def __post_init__(self) -> None:
        for key in ("max_num_batched_tokens", "max_num_seqs", "max_waiting", "tensor_parallel"):
            if getattr(self, key) < 1:
                raise ConfigError(key, getattr(self, key), "at least 1")
        for key in ("block_size", "num_blocks", "max_model_len", "num_threads"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(key, value, "at least 1, or left out")
        if self.dtype not in DTYPES:
            raise ConfigError("dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        if self.quantization not in (None, "fp8"):
            raise ConfigError("quantization", self.quantization, "fp8, or left out")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError("kv_cache_dtype", self.kv_cache_dtype, f"one of {', '.join(KV_CACHE_DTYPES)}")
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ConfigError("scheduling_policy", self.scheduling_policy, "fcfs or priority")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError("gpu_memory_utilization", self.gpu_memory_utilization, "above 0 and at most 1")
        if self.cuda_graph_memory_gib < 0:
            raise ConfigError("cuda_graph_memory_gib", self.cuda_graph_memory_gib, "0 or more")
        if self.load_format not in ("auto", "dummy"):
            raise ConfigError("load_format", self.load_format, "auto or dummy")
        if self.kv_cache_memory_gib is not None and self.kv_cache_memory_gib <= 0:
            raise ConfigError("kv_cache_memory_gib", self.kv_cache_memory_gib, "above 0, or left out")
        if self.max_num_seqs > self.max_num_batched_tokens:
            limit = f"at least max_num_seqs ({self.max_num_seqs}), so that every sequence can decode in one step"
            raise ConfigError("max_num_batched_tokens", self.max_num_batched_tokens, limit)
