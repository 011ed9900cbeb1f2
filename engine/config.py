"""Configuration of one engine. It is frozen, and contains only values that are known before the engine starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.config_options import check_choices, check_limits, option, parse_section
from engine.config_sections import EPLBConfig, HandoffConfig, KVEventsConfig, SpeculativeConfig, StructuredOutputsConfig
from engine.errors import ConfigError

# default tokens per KV block; on a GPU, 64 tokens of a head's K are one tile of our Triton kernel
BLOCK_SIZES = {"cpu": 16, "cuda": 64}
# used on a GPU when the configuration sets neither; on a CPU, steps of this size would take seconds
GPU_DEFAULTS = {"max_num_batched_tokens": 8192, "max_num_seqs": 256}

MAX_LORA_RANK = 256
DEFAULT_LORAS = 8

All2AllBackend = Literal["auto", "allgather_reducescatter", "alltoall"]

ENGINE_LIMITS = {
    "at least 1": "max_num_batched_tokens max_num_seqs max_waiting tensor_parallel_size pipeline_parallel_size "
    "data_parallel_size encoder_cache_size max_loras block_size num_gpu_blocks_override max_model_len num_threads "
    "max_kept_tapes kv_cache_memory_bytes",
    "at least 0": "prefix_cache_retention_interval tape_mib cuda_graph_memory_gib",
    "above 0": "max_hold_s kv_offloading_size kv_offloading_disk_size kv_offloading_store_size "
    "kv_offloading_ttl_s kv_offloading_timeout_s",
    "between 0 and 1": "max_held_share max_held_share_per_client",
    "above 0 and at most 1": "gpu_memory_utilization",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine, named as in vLLM where the meaning is the same."""

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
    enforce_eager: bool = option(
        False,
        "Launch every kernel separately, without CUDA graphs. Slower, with the same tokens.",
    )
    disable_custom_all_reduce: bool = option(
        False,
        "Let ranks on one machine use only NCCL or gloo for sums, without shared memory (docs/gpu.md).",
    )
    allow_untested_kernels: bool = option(
        False,
        "Let a GPU compute recurrent layers, latent attention, adapters and quantized experts by kernels that were not "
        "run on a GPU yet. Without this option, an engine that needs them does not start (docs/gpu.md).",
    )
    determinism: Literal["strict"] | None = option(
        None,
        "`strict` gives the same tokens and log-probabilities, bit for bit, with any number of ranks and in any batch "
        "(docs/determinism.md). Needs CPUs and unquantized weights.",
    )
    torch_compile: bool = option(
        False,
        "Compile the model's layers, except attention, with torch.compile when the engine starts (docs/gpu.md). "
        "`enforce_eager` overrides this option.",
    )
    cuda_graph_memory_gib: float = option(
        1.0,
        "GPU memory kept free for CUDA graphs. A step without a graph of its size is padded to a "
        "larger one, or runs without a graph.",
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
    max_num_seqs: int = option(
        128,
        "Maximum number of sequences that run at a time. If it is not set, the offline `LLM` on a GPU and pools with "
        "GPUs use 256.",
    )
    max_waiting: int = option(1024, "Maximum number of queued requests. Further requests are refused with Overloaded.")
    encoder_cache_size: int = option(
        16_384,
        "Number of image embeddings that are cached, so that an image is encoded only once. No image may have "
        "more embeddings. A step makes at most `max_num_batched_tokens` embeddings.",
    )
    enable_lora: bool = option(False, "Compute requests with low-rank adapters (LoRA) of the model.")
    max_loras: int | None = option(
        None,
        "Number of different adapters in one step. Memory for this number is reserved in addition to the model. "
        "Default: 8, or `max_cpu_loras` if that is less.",
    )
    max_lora_rank: int = option(
        16,
        "Highest rank of an adapter, at most 256. Every slot takes memory for this rank, so "
        "set it no higher than needed.",
    )
    max_cpu_loras: int | None = option(
        None, "Number of adapters that are kept in host memory, including those in slots. Default: `max_loras`."
    )
    language_model_only: bool = option(
        False, "Serve a multimodal model as a text model: its image encoder is not loaded, and images are refused."
    )
    scheduling_policy: Literal["fcfs", "priority"] = option(
        "fcfs", "`fcfs` orders requests by arrival, `priority` by priority and then arrival."
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
    max_held_share: float = option(
        0.5, "Fraction of the KV blocks that holds of clients may keep from being evicted (docs/holds.md); 0 for none."
    )
    max_held_share_per_client: float = option(0.25, "The same for the holds of one API key or client.")
    max_hold_s: float = option(86_400.0, "Longest time of a hold, in seconds; longer ones are refused.")
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
    kv_events_config: KVEventsConfig | None = option(
        None, "KV events for other routers, as a JSON object of vLLM's keys (docs/routing.md)."
    )
    structured_outputs_config: StructuredOutputsConfig | None = option(
        None, "Structured outputs, as a JSON object of vLLM's keys (docs/structured_outputs.md)."
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
    enable_expert_parallel: bool = option(
        False,
        "Give each of the `tensor_parallel_size` x `data_parallel_size` ranks some whole experts of a mixture, instead "
        "of a slice of every expert (docs/rank_groups.md).",
    )
    data_parallel_size: int = option(
        1,
        "Number of engines that share the experts of a mixture. Each has `tensor_parallel_size` ranks and its own "
        "requests, scheduler and KV cache, and computes attention itself; needs `enable_expert_parallel` "
        "(docs/rank_groups.md). Without it, the flag `--data-parallel-size` is `--num-replicas`, as in vLLM.",
    )
    all2all_backend: All2AllBackend = option(
        "auto",
        "How tokens travel between engines of `data_parallel_size` and the ranks that have their experts "
        "(docs/rank_groups.md): `allgather_reducescatter` sends them to all ranks, `alltoall` only to those that need "
        "them. `auto` chooses one of the two.",
    )
    enable_elastic_ep: bool = option(
        False,
        "Let the engines of `data_parallel_size` go on if one of them dies or hangs. The others take over its experts "
        "and its requests (docs/rank_groups.md).",
    )
    enable_eplb: bool = option(
        False,
        "Move experts between ranks by their measured load, with `enable_expert_parallel` on at least two ranks "
        "(docs/rank_groups.md).",
    )
    eplb_config: EPLBConfig | None = option(
        None, "When experts move and how many copies there are, as a JSON object of vLLM's keys."
    )
    pipeline_parallel_size: int = option(
        1,
        "Number of stages, each with some of the layers on `tensor_parallel_size` ranks. For models that are larger "
        "than one machine (docs/rank_groups.md).",
    )
    pipeline_layers: str | None = option(
        None, "Number of layers of each stage, such as `15,15,16,14`. Default: stages with about equal weights."
    )
    seed: int = option(0, "Offline `LLM`: seed of requests without one. A server derives such seeds from request ids.")
    speculative_config: SpeculativeConfig | None = option(
        None, "Speculative decoding, as a JSON object of vLLM's keys (docs/speculative_decoding.md)."
    )
    tape_mib: int = option(
        8,
        "MiB of memory for the newest part of the tape, from which `manta replay` shows every decision of the "
        "scheduler, and as much of `/dev/shm`; 0 for none (docs/replay.md).",
    )
    tape_dir: str | None = option(
        None,
        "Folder for the tapes of engines that failed, hung or were killed, or whose first tokens were late. Default: "
        "`manta-tapes-UID` in the folder for temporary files.",
    )
    max_kept_tapes: int = option(8, "Maximum number of files in `tape_dir` for each cause; the newest stay.")
    handoff: HandoffConfig | None = option(None, "Options of an engine that takes part in handoffs, in any role.")
    encode: HandoffConfig | None = option(
        None, "Options for image handoffs, in an engine whose images may be encoded by encode replicas."
    )

    @property
    def num_ranks(self) -> int:
        """Ranks of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def world_size(self) -> int:
        """Ranks of all engines that share experts."""
        return self.num_ranks * self.data_parallel_size

    @property
    def slots(self) -> int:
        """Maximum number of sequences that run at a time in all engines that share experts."""
        return self.max_num_seqs * self.data_parallel_size

    @property
    def lora_slots(self) -> int:
        """Number of different adapters in one step."""
        return self.max_loras or min(DEFAULT_LORAS, max(1, self.max_cpu_loras or DEFAULT_LORAS))

    @property
    def layout(self) -> tuple[int, bool, bool, int]:
        """How layers are split over ranks. Without `determinism: strict`, it may change bits of an answer."""
        spread = self.enable_expert_parallel and self.tensor_parallel_size > 1
        return self.tensor_parallel_size, spread, self.enable_eplb, self.data_parallel_size

    @property
    def eplb(self) -> EPLBConfig:
        return self.eplb_config or EPLBConfig()

    @property
    def structured_outputs(self) -> StructuredOutputsConfig:
        return self.structured_outputs_config or StructuredOutputsConfig()

    @property
    def redundant_experts(self) -> int | None:
        """Number of redundant experts of each layer; None if experts do not move."""
        return self.eplb.num_redundant_experts if self.enable_eplb else None

    @property
    def offloads_kv(self) -> bool:
        """Whether there are tiers below the KV cache."""
        sizes = self.kv_offloading_size, self.kv_offloading_disk_size, self.kv_offloading_store_size
        return any(size is not None for size in sizes)

    @property
    def known_block_size(self) -> int:
        """`block_size`, for callers without an engine. Raises AssertionError if it is None (chosen by the device)."""
        assert self.block_size is not None, "an engine chooses the block size by its device"
        return self.block_size

    @property
    def shared_block_size(self) -> int | None:
        """Size of the blocks that requests with a common prefix share; None without prefix caching."""
        return self.known_block_size if self.enable_prefix_caching else None

    def __post_init__(self) -> None:
        check_limits(self, ENGINE_LIMITS)
        if not 1 <= self.max_lora_rank <= MAX_LORA_RANK:
            raise ConfigError("max_lora_rank", self.max_lora_rank, f"between 1 and {MAX_LORA_RANK}")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.lora_slots:
            limit = f"at least max_loras ({self.max_loras or 1}), or left out"
            raise ConfigError("max_cpu_loras", self.max_cpu_loras, limit)
        check_choices(self)
        self._check_data_parallel()
        self._check_offloading()
        if isinstance(self.speculative_config, dict):
            speculative = parse_section(SpeculativeConfig, "speculative_config", self.speculative_config)
            object.__setattr__(self, "speculative_config", speculative)
        if isinstance(self.kv_events_config, dict):
            kv_events = parse_section(KVEventsConfig, "kv_events_config", self.kv_events_config)
            object.__setattr__(self, "kv_events_config", kv_events)
        if isinstance(self.eplb_config, dict):
            object.__setattr__(self, "eplb_config", parse_section(EPLBConfig, "eplb_config", self.eplb_config))
        if isinstance(given := self.structured_outputs_config, dict):
            outputs = parse_section(StructuredOutputsConfig, "structured_outputs_config", given)
            object.__setattr__(self, "structured_outputs_config", outputs)
        if self.enable_eplb:
            if not self.enable_expert_parallel or self.tensor_parallel_size * self.data_parallel_size == 1:
                raise ConfigError("enable_eplb", True, "false without enable_expert_parallel on at least two ranks")
            if self.enable_lora:
                raise ConfigError(
                    "enable_eplb", True, "false with enable_lora, because adapters of experts do not move"
                )
        if self.kv_events_config is not None and self.kv_events_config.publishes:
            if not self.enable_prefix_caching:
                limit = "true with KV events, because they report the blocks of the prefix cache"
                raise ConfigError("enable_prefix_caching", False, limit)
            self.kv_events_config.check_engines(self.data_parallel_size)
        if self.handoff is not None and self.handoff.enable_prefix_fetching and not self.enable_prefix_caching:
            limit = "true with `handoff.enable_prefix_fetching`, because KV is fetched into the prefix cache"
            raise ConfigError("enable_prefix_caching", False, limit)
        if self.max_num_seqs > self.max_num_batched_tokens:
            limit = f"at least max_num_seqs ({self.max_num_seqs}), so that every sequence can decode in one step"
            raise ConfigError("max_num_batched_tokens", self.max_num_batched_tokens, limit)

    def _check_data_parallel(self) -> None:
        if self.data_parallel_size == 1:
            if self.enable_elastic_ep:
                raise ConfigError("enable_elastic_ep", True, "false without data_parallel_size above 1")
            if self.all2all_backend != "auto":
                limit = "auto without data_parallel_size above 1, because all ranks of an engine have all of its tokens"
                raise ConfigError("all2all_backend", self.all2all_backend, limit)
            return
        if not self.enable_expert_parallel:
            limit = "1 without enable_expert_parallel; for independent engines, use replicas instead"
            raise ConfigError("data_parallel_size", self.data_parallel_size, limit)
        if self.pipeline_parallel_size > 1:
            for key, why in (
                ("enable_elastic_ep", "the steps under way in all stages would have to be launched again"),
                ("enable_eplb", "only the first stage reports the load of its experts"),
            ):
                if getattr(self, key):
                    limit = f"false with both data_parallel_size and pipeline_parallel_size above 1, because {why}"
                    raise ConfigError(key, True, limit)

    def _check_offloading(self) -> None:
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
