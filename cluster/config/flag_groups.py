"""Groups of flags for `--help=GROUP`, named as in vLLM where they are about the same."""

from __future__ import annotations

GROUPS = {  # name -> what it is about, and its flags
    "Frontend": (
        "Name, address, keys and HTTPS; formats of chats",
        "served_model_name host port api_key api_keys_file ssl_certfile ssl_keyfile allowed_origins root_path "
        "chat_template default_chat_template_kwargs tool_call_parser reasoning_parser log_level",
    ),
    "Replicas": (
        "Number of replicas, and CPUs and GPUs of each",
        "num_gpus num_cpus accelerator_type num_replicas min_replicas max_replicas prefill_replicas",
    ),
    "ModelConfig": (
        "Files of the model, data types and context",
        "revision tokenizer hf_overrides load_format dtype quantization max_model_len generation_config "
        "override_generation_config",
    ),
    "ParallelConfig": (
        "Ranks over which models and experts are split",
        "tensor_parallel_size pipeline_parallel_size pipeline_layers data_parallel_size enable_expert_parallel "
        "all2all_backend enable_eplb eplb_config disable_custom_all_reduce",
    ),
    "CacheConfig": (
        "Memory for the KV cache, and prefix caching",
        "gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override block_size kv_cache_dtype "
        "enable_prefix_caching prefix_cache_retention_interval",
    ),
    "KVOffloadingConfig": (
        "KV blocks in host memory, on disk and in a store",
        "kv_offloading_size kv_offloading_disk_size kv_offloading_dir kv_offloading_store kv_offloading_store_size "
        "kv_offloading_key_file kv_offloading_ttl_s kv_offloading_timeout_s kv_check_every",
    ),
    "HoldConfig": (
        "Limits of prompts that clients keep cached",
        "max_held_share max_held_share_per_client max_hold_s",
    ),
    "SchedulerConfig": (
        "Size of a step, number and order of requests",
        "max_num_seqs max_num_batched_tokens max_prefill_step_s long_prefill_token_threshold max_num_partial_prefills "
        "max_long_partial_prefills max_waiting scheduling_policy async_scheduling",
    ),
    "LoRAConfig": (
        "LoRA adapters",
        "lora_modules lora_dynamic_folder allow_runtime_lora_updating enable_lora max_loras max_lora_rank "
        "max_cpu_loras",
    ),
    "SpeculativeConfig": ("Speculative decoding", "speculative_config"),
    "StructuredOutputsConfig": ("JSON schemas and grammars", "structured_outputs_config"),
    "MultiModalConfig": ("Images", "encoder_cache_size language_model_only"),
    "KVEventsConfig": ("KV events for other routers", "kv_events_config"),
    "KernelConfig": (
        "Device, threads, kernels, compilation, CUDA graphs",
        "device num_threads determinism enforce_eager torch_compile cuda_graph_memory_gib allow_untested_kernels",
    ),
    "TapeConfig": ("Recordings of the scheduler's decisions", "tape_mib tape_dir max_kept_tapes"),
}
COMMON = [  # flags that `--help` shows without a group, in this order
    *("served_model_name", "host", "port", "api_key", "num_gpus", "num_replicas", "tensor_parallel_size", "dtype"),
    *("quantization", "max_model_len", "max_num_seqs", "gpu_memory_utilization", "kv_cache_memory_bytes"),
]
GROUP_OF = {flag: group for group, (_, flags) in GROUPS.items() for flag in flags.split()}
