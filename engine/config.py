"""Configuration of one engine. It is frozen, and contains only values that are known before the engine starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from math import inf
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from engine.errors import ConfigError

# default tokens per KV block; on a GPU, 64 tokens of a head's K are one tile of our Triton kernel
BLOCK_SIZES = {"cpu": 16, "cuda": 64}
# used on a GPU when the configuration sets neither; on a CPU, steps of this size would take seconds
GPU_DEFAULTS = {"max_num_batched_tokens": 8192, "max_num_seqs": 256}

MAX_LORA_RANK = 256

LIMITS: dict[str, Callable[[float], bool]] = {
    "at least 0": lambda value: 0 <= value < inf,
    "at least 1": lambda value: value >= 1,
    "above 0": lambda value: value > 0,
    "between 0 and 1": lambda value: 0 <= value <= 1,
    "above 0 and at most 1": lambda value: 0 < value <= 1,
}

T = TypeVar("T")


All2AllBackend = Literal["auto", "allgather_reducescatter", "alltoall", "flashinfer_nvlink_one_sided"]
ONE_SIDED = "flashinfer_nvlink_one_sided"

MAX_SPECULATIVE_TOKENS = 32  # per sequence and step; more never save time


def check_choices(config: Any, section: str = "") -> None:
    """Raise ConfigError for a field whose value is not among the choices of its Literal type."""
    for key, hint in get_type_hints(type(config)).items():
        value, kinds = getattr(config, key), (hint, *get_args(hint))
        choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
        if choices and value not in choices and not (value is None and NoneType in kinds):
            left_out = ", or left out" if NoneType in kinds else ""
            limit = f"{'one of ' if len(choices) > 1 else ''}{', '.join(choices)}{left_out}"
            raise ConfigError(f"{section}{key}", value, limit)


def check_limits(config: Any, limits: dict[str, str], section: str = "") -> None:
    """Raise ConfigError for a field outside its limit. limits: names of fields by a key of LIMITS."""
    for limit, names in limits.items():
        for key in names.split():
            value, may_be_left_out = getattr(config, key), config.__dataclass_fields__[key].default is None
            if value is not None and not LIMITS[limit](value):
                raise ConfigError(f"{section}{key}", value, f"{limit}{', or left out' if may_be_left_out else ''}")


def option(default: T, help: str, **flag: Any) -> T:
    """Return a dataclass field with a help text, which `--help` shows too. flag: further arguments of
    `typer.Option`."""
    return field(default=default, metadata={"help": help, **flag})


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConfig:
    """Options of an engine in a cluster with several pools, some of which compute prompts or images for others
    (docs/handoff.md)."""

    role: Literal["prefill", "decode", "encode", "replica"] = field(
        metadata={
            "help": "`prefill` computes prompts for decode engines; `decode` may let prefill engines compute "
            "its prompts; `encode` encodes images for both; `replica` only moves running requests and fetches cached "
            "KV, which `decode` can also do."
        }
    )
    transport: Literal["auto", "tcp", "nixl"] = option(
        "auto", "How KV blocks are transferred. `auto` uses the fastest transport that both sides have."
    )
    policy: Literal["auto", "always", "never"] = option(
        "auto", "Whether a decode engine lets prefill engines compute prompts; `auto` compares the costs."
    )
    lease_s: float = option(
        10.0,
        "Seconds that a prefill engine keeps the blocks of a handoff after the decode engine's last heartbeat.",
    )
    heartbeat_s: float = option(1.0, "Seconds between the heartbeats of a decode engine.")
    progress_s: float = option(
        5.0,
        "Seconds without an answer to a heartbeat, or without a byte of a read, after which a link counts as broken.",
    )
    accept_s: float = option(5.0, "Seconds within which a prefill engine must accept a request.")
    quarantine_s: float = option(30.0, "Seconds without handoffs between two engines after their link has failed.")
    max_attempts: int = option(
        3, "Maximum number of remote attempts per request. If all fail, its prompt is computed locally."
    )

    move_requests: bool = option(
        True,
        "Whether running requests of a replica that stops, or that is out of KV blocks, move to another replica, "
        "with their KV. Needs no prefill pool.",
    )

    enable_prefix_fetching: bool = option(
        False,
        "Whether a replica fetches KV that another replica of its pool has cached, if that is faster than "
        "computing it. Needs no prefill pool.",
    )
    fetch_timeout_s: float = option(
        5.0, "Seconds that a request waits for KV from another replica's cache. After this time, the KV is computed."
    )

    enable_warm_start: bool = option(
        False,
        "Whether a new replica fetches the prefixes that other replicas use most, before it takes requests. Needs "
        "`enable_prefix_fetching`.",
    )
    warm_start_timeout_s: float = option(10.0, "Maximum number of seconds by which a warm start delays a new replica.")
    warm_start_bytes: int = option(2**30, "Maximum number of bytes of KV that a warm start fetches.")

    switch_roles: bool = option(
        False,
        "Whether replicas change between the prefill and the decode pool under load, in about a second and without a "
        "restart. Needs a `prefill` section with the same options as `decode`, and the autoscaling policy.",
    )

    def __post_init__(self) -> None:
        times = "lease_s heartbeat_s progress_s accept_s fetch_timeout_s warm_start_timeout_s"
        check_limits(self, {"above 0": f"{times} warm_start_bytes", "at least 1": "max_attempts"}, "handoff.")
        if self.lease_s < 3 * self.heartbeat_s:
            raise ConfigError("handoff.lease_s", self.lease_s, f"at least 3 heartbeats ({3 * self.heartbeat_s:g} s)")
        if self.enable_warm_start and not self.enable_prefix_fetching:
            raise ConfigError("handoff.enable_warm_start", True, "false without `enable_prefix_fetching`")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Options of speculative decoding, named as in vLLM (docs/speculative_decoding.md)."""

    method: Literal["ngram", "suffix", "draft_model", "eagle3", "mtp", "medusa"] = field(
        metadata={
            "help": "`ngram` looks for the newest tokens earlier in prompt and output, and proposes the tokens "
            "that followed there. `suffix` also looks in earlier answers, and proposes the most frequent continuation. "
            "The other methods have weights: a smaller model, or heads that read this model's hidden states."
        }
    )
    model: str | None = option(None, "`draft_model`, `eagle3` and `medusa`: folder or Hub id of the weights.")
    num_speculative_tokens: int = option(
        5,
        "Maximum number of drafted tokens per sequence and step. Fewer are drafted under load, or if few are accepted.",
    )
    prompt_lookup_min: int = option(2, "`ngram`: minimum length of a match, in tokens.")
    prompt_lookup_max: int = option(5, "`ngram`: maximum length of a match, in tokens; the longest match wins.")
    suffix_decoding_max_tree_depth: int = option(24, "`suffix`: maximum length of a match and its draft together.")
    suffix_decoding_max_cached_requests: int = option(10_000, "`suffix`: earlier answers to keep; 0 keeps none.")
    suffix_decoding_max_spec_factor: float = option(1.0, "`suffix`: drafted tokens per token of the match.")
    suffix_decoding_min_token_prob: float = option(
        0.1, "`suffix`: share of the matches that must agree with a drafted token and all before it."
    )

    def __post_init__(self) -> None:
        check_choices(self, "speculative.")
        if not 1 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            limit = f"between 1 and {MAX_SPECULATIVE_TOKENS}"
            raise ConfigError("speculative.num_speculative_tokens", self.num_speculative_tokens, limit)
        needs_model = self.method in ("draft_model", "eagle3", "medusa")
        if needs_model != (self.model is not None):
            limit = f"{'given' if needs_model else 'left out'} with method {self.method}"
            raise ConfigError("speculative.model", self.model, limit)
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            limit = f"at least 1, and at most prompt_lookup_max ({self.prompt_lookup_max})"
            raise ConfigError("speculative.prompt_lookup_min", self.prompt_lookup_min, limit)
        for key, fits, limit in (
            ("max_tree_depth", self.suffix_decoding_max_tree_depth >= 2, "at least 2"),
            ("max_cached_requests", self.suffix_decoding_max_cached_requests >= 0, "at least 0"),
            ("max_spec_factor", 0 < self.suffix_decoding_max_spec_factor < inf, "above 0"),
            ("min_token_prob", 0 <= self.suffix_decoding_min_token_prob <= 1, "between 0 and 1"),
        ):
            if not fits:
                raise ConfigError(f"speculative.suffix_decoding_{key}", getattr(self, f"suffix_decoding_{key}"), limit)

    @property
    def has_weights(self) -> bool:
        """Whether a second model on the device makes the drafts."""
        return self.method not in ("ngram", "suffix")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Options of KV events in vLLM's format, named as in vLLM (docs/routing.md)."""

    enable_kv_cache_events: bool = option(False, "Publish the blocks of the prefix cache, and their tokens.")
    publisher: Literal["zmq", "null"] | None = option(None, "`null` publishes nothing. Default: `zmq`.")
    endpoint: str | None = option(
        None,
        "ZMQ address to publish at. As in vLLM, it is bound if it contains `*` or `::` or begins with `ipc:`, "
        "and connected to otherwise. Default: port 5557, bound for this machine only. If the port is "
        "taken, an engine binds the next one.",
    )
    replay_endpoint: str | None = option(
        None, "ZMQ address to bind for subscribers that request the batches that they missed."
    )
    buffer_steps: int = option(10_000, "Number of newest batches that are kept for such requests.")
    hwm: int = option(
        100_000, "Maximum number of batches that wait for one subscriber. The subscriber loses further batches."
    )
    topic: str = option("", "First frame of all messages: llm-d expects `kv@ADDRESS@MODEL`.")
    use_int_block_hashes: bool = option(
        True,
        "Send the low 64 bits of hashes as integers instead of 16 bytes. vLLM has the environment variable "
        "`VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES` for this.",
    )

    def __post_init__(self) -> None:
        check_choices(self, "kv_events_config.")
        check_limits(self, {"at least 1": "buffer_steps hwm"}, "kv_events_config.")

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"


@dataclass(frozen=True, slots=True, kw_only=True)
class EPLBConfig:
    """Options of the expert parallel load balancer, named as in vLLM (docs/rank_groups.md)."""

    window_size: int = option(1000, "Number of steps over which the load of experts is measured.")
    step_interval: int = option(3000, "Number of steps between two decisions to move experts.")
    num_redundant_experts: int = option(
        0,
        "Number of copies, of each layer's experts together, beyond the first copy of each expert. The most loaded "
        "experts have several copies, on different ranks.",
    )
    log_balancedness: bool = option(False, "Log the mean load of a rank divided by the maximum, once per window.")

    def __post_init__(self) -> None:
        for key, least in (("window_size", 1), ("step_interval", self.window_size), ("num_redundant_experts", 0)):
            if getattr(self, key) < least:
                limit = f"at least {least}{' (window_size)' if key == 'step_interval' else ''}"
                raise ConfigError(f"eplb_config.{key}", getattr(self, key), limit)


def parse_section(config: type[T], section: str, options: dict[str, Any]) -> T:
    """Return the dataclass with these options. Raises ConfigError for unknown keys and wrong values."""
    hints = get_type_hints(config)
    for key, value in options.items():
        if key not in hints:
            raise ConfigError(f"{section}.{key}", value, f"left out; the known keys are {', '.join(hints)}")
        kind, kinds = hints[key], get_args(hints[key])
        if kind in (int, bool) and type(value) is not kind:
            raise ConfigError(f"{section}.{key}", value, "an integer" if kind is int else "true or false")
        if kind is float and type(value) not in (int, float):
            raise ConfigError(f"{section}.{key}", value, "a number")
        if (kind is str or str in kinds) and not isinstance(value, str | (NoneType if kinds else str)):
            raise ConfigError(f"{section}.{key}", value, "a string")
    for f in fields(config):  # type: ignore[arg-type]
        if f.default is MISSING and f.name not in options:
            raise ConfigError(f"{section}.{f.name}", None, "given")
    return config(**options)


ENGINE_LIMITS = {
    "at least 1": "max_num_batched_tokens max_num_seqs max_waiting tensor_parallel pipeline_parallel data_parallel "
    "encoder_cache_size max_loras block_size num_blocks max_model_len num_threads max_kept_tapes",
    "at least 0": "prefix_cache_retention_interval tape_mib cuda_graph_memory_gib",
    "above 0": "max_hold_s kv_cache_memory_gib kv_offloading_size kv_offloading_disk_size kv_offloading_store_size "
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
    kv_cache_memory_gib: float | None = option(
        None,
        "Size of the KV cache. Default: 2 GiB on a CPU; on a GPU, the rest of `gpu_memory_utilization` after a "
        "profiling run.",
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
    determinism: Literal["strict"] | None = option(
        None,
        "`strict` gives the same tokens and log-probabilities, bit for bit, with any number of ranks and in any batch "
        "(docs/determinism.md). Needs unquantized weights; on a GPU, it supports only dense models in bfloat16.",
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
    num_blocks: int | None = option(None, "Number of KV blocks, instead of a size in memory.")
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
    max_loras: int = option(
        8, "Number of different adapters in one step. Memory for this number is reserved in addition to the model."
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
    overlap: bool | None = option(
        None,
        "Plan step n+1 while step n computes. Default: yes on a GPU; no on a CPU, where both would use the same "
        "cores (docs/measurements/performance.md).",
    )
    num_threads: int | None = option(
        None,
        "CPU threads per rank. Default: the cores that the process may use, divided among a machine's ranks.",
    )
    tensor_parallel: int = option(1, "Number of ranks that share each layer, or each stage's layers.")
    expert_parallel: bool = option(
        False,
        "Give each of the `tensor_parallel` x `data_parallel` ranks some whole experts of a mixture, instead of a "
        "slice of every expert (docs/rank_groups.md).",
    )
    data_parallel: int = option(
        1,
        "Number of engines that share the experts of a mixture. Each has `tensor_parallel` ranks and its own requests, "
        "scheduler and KV cache, and computes attention itself; needs `expert_parallel` (docs/rank_groups.md).",
    )
    all2all_backend: All2AllBackend = option(
        "auto",
        "How tokens travel between engines of `data_parallel` and the ranks that have their experts "
        "(docs/rank_groups.md): `allgather_reducescatter` sends them to all ranks, `alltoall` only to those that need "
        "them, and `flashinfer_nvlink_one_sided` does so by FlashInfer's kernels. `auto` chooses one of the first two.",
    )
    enable_elastic_ep: bool = option(
        False,
        "Let the engines of `data_parallel` go on if one of them dies or hangs. The others take over its experts and "
        "its requests (docs/rank_groups.md).",
    )
    enable_eplb: bool = option(
        False,
        "Move experts between ranks by their measured load, with `expert_parallel` on at least two ranks "
        "(docs/rank_groups.md).",
    )
    eplb_config: EPLBConfig | None = option(
        None, "When experts move and how many copies there are, as a JSON object of vLLM's keys."
    )
    pipeline_parallel: int = option(
        1,
        "Number of stages, each with some of the layers on `tensor_parallel` ranks. For models that are larger than "
        "one machine (docs/rank_groups.md).",
    )
    pipeline_layers: str | None = option(
        None, "Number of layers of each stage, such as `15,15,16,14`. Default: stages with about equal weights."
    )
    seed: int = option(0, "Offline `LLM`: seed of requests without one. A server derives such seeds from request ids.")
    speculative: SpeculativeConfig | None = option(
        None, "Speculative decoding, as a JSON object of vLLM's keys (docs/speculative_decoding.md)."
    )
    tape_mib: int = option(
        0,
        "MiB of memory for the newest part of the tape, from which `manta replay` shows every decision of the "
        "scheduler, such as 16; 0 for none (docs/replay.md).",
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
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def world_size(self) -> int:
        """Ranks of all engines that share experts."""
        return self.num_ranks * self.data_parallel

    @property
    def slots(self) -> int:
        """Maximum number of sequences that run at a time in all engines that share experts."""
        return self.max_num_seqs * self.data_parallel

    @property
    def layout(self) -> tuple[int, bool, bool, int]:
        """How layers are split over ranks. Without `determinism: strict`, it may change bits of an answer."""
        spread = self.expert_parallel and self.tensor_parallel > 1
        return self.tensor_parallel, spread, self.enable_eplb, self.data_parallel

    @property
    def eplb(self) -> EPLBConfig:
        return self.eplb_config or EPLBConfig()

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
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                "max_cpu_loras", self.max_cpu_loras, f"at least max_loras ({self.max_loras}), or left out"
            )
        check_choices(self)
        self._check_data_parallel()
        self._check_offloading()
        if isinstance(self.speculative, dict):
            speculative = parse_section(SpeculativeConfig, "speculative", self.speculative)
            object.__setattr__(self, "speculative", speculative)
        if isinstance(self.kv_events_config, dict):
            kv_events = parse_section(KVEventsConfig, "kv_events_config", self.kv_events_config)
            object.__setattr__(self, "kv_events_config", kv_events)
        if isinstance(self.eplb_config, dict):
            object.__setattr__(self, "eplb_config", parse_section(EPLBConfig, "eplb_config", self.eplb_config))
        if self.enable_eplb:
            if not self.expert_parallel or self.tensor_parallel * self.data_parallel == 1:
                raise ConfigError("enable_eplb", True, "false without expert_parallel on at least two ranks")
            if self.enable_lora:
                raise ConfigError(
                    "enable_eplb", True, "false with enable_lora, because adapters of experts do not move"
                )
        if self.kv_events_config is not None and self.kv_events_config.publishes and not self.enable_prefix_caching:
            raise ConfigError(
                "enable_prefix_caching",
                False,
                "true with KV events, because they report the blocks of the prefix cache",
            )
        if self.handoff is not None and self.handoff.enable_prefix_fetching and not self.enable_prefix_caching:
            limit = "true with `handoff.enable_prefix_fetching`, because KV is fetched into the prefix cache"
            raise ConfigError("enable_prefix_caching", False, limit)
        if self.max_num_seqs > self.max_num_batched_tokens:
            limit = f"at least max_num_seqs ({self.max_num_seqs}), so that every sequence can decode in one step"
            raise ConfigError("max_num_batched_tokens", self.max_num_batched_tokens, limit)

    def _check_data_parallel(self) -> None:
        if self.data_parallel == 1:
            if self.enable_elastic_ep:
                raise ConfigError("enable_elastic_ep", True, "false without data_parallel above 1")
            if self.all2all_backend != "auto":
                limit = "auto without data_parallel above 1, because all ranks of an engine have all of its tokens"
                raise ConfigError("all2all_backend", self.all2all_backend, limit)
            return
        if not self.expert_parallel:
            limit = "1 without expert_parallel; for independent engines, use replicas instead"
            raise ConfigError("data_parallel", self.data_parallel, limit)
        if self.pipeline_parallel > 1:
            for key, why in (
                ("enable_elastic_ep", "the steps under way in all stages would have to be launched again"),
                ("enable_eplb", "only the first stage reports the load of its experts"),
            ):
                if getattr(self, key):
                    limit = f"false with both data_parallel and pipeline_parallel above 1, because {why}"
                    raise ConfigError(key, True, limit)
        if self.all2all_backend == ONE_SIDED:
            reasons = {
                "determinism: strict": (self.determinism, "it adds in another order than the fixed one"),
                "enable_elastic_ep": (self.enable_elastic_ep, "its memory belongs to all ranks of the start"),
            }
            for key, (given, because) in reasons.items():
                if given:
                    raise ConfigError("all2all_backend", ONE_SIDED, f"another one with {key}, because {because}")

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
