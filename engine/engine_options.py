"""Options of every engine. Those of a feature are in engine/options/."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

from engine.config_options import check_limits, option
from engine.errors import ConfigError

# default tokens per KV block; on a GPU, 64 tokens of a head's K are one tile of our Triton kernel
BLOCK_SIZES = {"cpu": 16, "cuda": 64}
# used on a GPU when the configuration sets neither; on a CPU, steps of this size would take seconds
GPU_DEFAULTS = {"max_num_batched_tokens": 8192, "max_num_seqs": 256}

LIMITS = {
    "at least 1": "max_num_batched_tokens max_num_seqs max_num_partial_prefills max_long_partial_prefills max_waiting "
    "tensor_parallel_size block_size num_gpu_blocks_override max_model_len num_threads kv_cache_memory_bytes",
    "at least 0": "prefix_cache_retention_interval max_prefill_step_s long_prefill_token_threshold",
    "above 0 and at most 1": "gpu_memory_utilization",
}


Options = TypeVar("Options", bound="EngineOptions")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of every engine, named as in vLLM where the meaning is the same."""

    model: str = option("pocket", "`pocket` (bundled), a local Hugging Face model folder, or a Hub id.")
    tokenizer: str | None = option(None, "Folder or Hub id of a model whose tokenizer and chat template to use.")
    hf_overrides: str | None = option(None, "JSON object of fields that replace those of the model's config.json.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "Data type of activations, KV cache and unquantized weights. `auto` uses the model's own.",
    )
    quantization: Literal["fp8", "int8", "int4", "awq", "gptq", "compressed-tensors", "mxfp4"] | None = option(
        None,
        "`fp8`, `int8` or `int4`: format to which the weights of an unquantized model are rounded as they are loaded. "
        "The format of a quantized checkpoint is read from its config.json; this option may also name it.",
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = option(
        "auto", "`fp8` (the same as `fp8_e4m3`) stores each number of K and V in one byte; `auto` uses `dtype`."
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "`auto` uses a GPU if torch finds one.")
    block_size: int | None = option(None, "Tokens per KV block. Default: 16 on a CPU, 64 on a GPU.")
    kv_cache_memory_bytes: int | None = option(
        None,
        "Size of the KV cache; as a flag also `4G`. Default: 2 GiB on a CPU, or half of the memory that is available "
        "in the container's limits if that is less; on a GPU, the rest of `gpu_memory_utilization` after profiling.",
    )
    gpu_memory_utilization: float = option(
        0.9, "Fraction of a GPU's memory for weights, KV cache and activations together."
    )
    load_format: Literal["auto", "dummy"] = option(
        "auto", "`auto` reads the model's weights; `dummy` uses random ones of the same shapes, for measurements."
    )
    num_gpu_blocks_override: int | None = option(None, "Number of KV blocks, instead of a size in memory.")
    max_model_len: int | None = option(
        None, "Maximum number of tokens of prompt and answer together. Default: the model's own context."
    )
    max_num_batched_tokens: int = option(
        2048,
        "Maximum number of tokens per step, over all sequences. If it is not set, the offline `LLM` on a GPU and pools "
        "with GPUs use 8192.",
    )
    max_prefill_step_s: float = option(
        0.2,
        "Time in seconds that a step with prompts is to take at most. The engine learns how many tokens of prompts fit "
        "into it; a 64th of `max_num_batched_tokens` always do. 0 sets no limit, and is the offline `LLM`'s default "
        "(docs/scheduling.md).",
    )
    long_prefill_token_threshold: int = option(
        0,
        "Maximum number of tokens of one prompt per step, as long as there are other requests. 0 sets no limit.",
    )
    max_num_partial_prefills: int | None = option(
        None,
        "Maximum number of prompts that are computed in part at a time. A prompt that fits into the step may start all "
        "the same. Default: no limit.",
    )
    max_long_partial_prefills: int | None = option(
        None,
        "The same of prompts that have more than `long_prefill_token_threshold` tokens to compute, or, if that is not "
        "set, more than 4 % of `max_model_len`. Default: no limit.",
    )
    max_num_seqs: int = option(
        128,
        "Maximum number of sequences that run at a time. If it is not set, the offline `LLM` on a GPU and pools with "
        "GPUs use 256.",
    )
    max_waiting: int = option(1024, "Maximum number of queued requests. Further requests are refused with Overloaded.")
    scheduling_policy: Literal["fcfs", "priority"] = option(
        "fcfs", "`priority` puts requests with a smaller `priority` first; `fcfs` knows no priorities."
    )
    enable_prefix_caching: bool = option(
        True, "Keep computed KV blocks and reuse them for prompts with the same prefix."
    )
    prefix_cache_retention_interval: int | None = option(
        None,
        "Number of tokens between two snapshots of recurrent states in a long sequence; 0 for none. Snapshots at "
        "the end of a prompt, and where prompts diverge, are kept in addition. Default: the number of tokens "
        "whose KV takes as much memory as a snapshot.",
    )
    async_scheduling: bool | None = option(
        None,
        "Plan step n+1 while step n computes. Default: yes on a GPU; no on a CPU, where both would use the same "
        "cores (docs/measurements/performance.md).",
    )
    num_threads: int | None = option(
        None,
        "CPU threads per rank. Default: the CPUs that the process may use, by affinity and by its container's quota, "
        "divided among the machine's ranks without a GPU. Above eight CPUs, a server leaves one to its ingresses.",
    )
    tensor_parallel_size: int = option(1, "Number of ranks that share each layer, or each stage's layers.")
    seed: int = option(0, "Offline `LLM`: seed of requests without one. A server derives such seeds from request ids.")

    @property
    def known_block_size(self) -> int:
        """`block_size`, for callers without an engine. Raises AssertionError if it is None (chosen by the device)."""
        assert self.block_size is not None, "an engine chooses the block size by its device"
        return self.block_size

    @property
    def shared_block_size(self) -> int | None:
        """Size of the blocks that requests with a common prefix share; None without prefix caching."""
        return self.known_block_size if self.enable_prefix_caching else None

    def of(self, feature: type[Options]) -> Options:
        """Return these options, as those of a feature that has further ones. Raises TypeError for options without."""
        if not isinstance(self, feature):
            raise TypeError(f"{type(self).__name__} has no {feature.__name__}")
        return self

    def check(self) -> None:
        """Raise ConfigError for a value that cannot be, alone or beside others."""
        check_limits(self, LIMITS)
        if self.max_num_seqs > self.max_num_batched_tokens:
            limit = f"at least max_num_seqs ({self.max_num_seqs}), so that every sequence can decode in one step"
            raise ConfigError("max_num_batched_tokens", self.max_num_batched_tokens, limit)
