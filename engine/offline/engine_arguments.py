"""Translates keyword arguments of vLLM's `LLM`, which are the flags of `vllm serve`, to fields of EngineConfig."""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.offline.vllm_flags import NAMES, NOT_READ, RENAMED, VALUES, FlagRow, draft_options, find, takes

logger = logging.getLogger(__name__)

FIELDS = {field.name for field in fields(EngineConfig)}
NEUTRAL: tuple[Any, ...] = (None, False, 0, "", "auto", [], (), {}, set())
"""Values with which a refused argument asks for nothing, as vLLM's own defaults do."""
DEFAULTS: dict[str, Any] = {  # the other defaults of vLLM 0.32, with which an argument asks for nothing either
    "cp_kv_cache_interleave_size": 1, "data_parallel_backend": "mp", "dbo_decode_token_threshold": 32,
    "dbo_prefill_token_threshold": 512, "dcp_comm_backend": "ag_rs", "dcp_kv_cache_interleave_size": 1,
    "decode_context_parallel_size": 1, "dp_sync_interval": 16, "expert_placement_strategy": "linear",
    "ignore_patterns": ["original/**/*"], "jit_monitor_mode": "warn", "kv_cache_metrics_sample": 0.01,
    "kv_offloading_backend": "native", "logprobs_mode": "raw_logprobs", "mamba_backend": "triton",
    "mamba_cache_mode": "none", "master_addr": "127.0.0.1", "master_port": 29501, "max_logprobs": 20,
    "mm_device_do_normalize": True, "mm_encoder_fp8_scale_save_margin": 1.5, "mm_encoder_tp_mode": "weights",
    "mm_hasher_algorithm": "blake3", "mm_processor_cache_gb": 4, "mm_processor_cache_type": "lru",
    "mm_shm_cache_max_object_size_mb": 128, "mm_tensor_ipc": "direct_rpc", "nnodes": 1, "offload_num_in_group": 1,
    "offload_prefetch_step": 1, "optimization_level": 2, "per_request_spec_decode_metrics": "none",
    "performance_mode": "balanced", "prefill_context_parallel_size": 1, "prefill_schedule_interval": 1,
    "prefix_caching_hash_algo": "sha256", "pt_load_map_location": "cpu", "renderer_num_workers": 1,
    "replayssm_buffer_len": 16, "safetensors_prefetch_block_size": 16 * 2**20, "safetensors_prefetch_num_threads": 8,
    "scheduler_reserve_full_isl": True, "stream_interval": 1, "swa_bounded_replay": True, "use_tqdm_on_load": True,
    "video_pruning_method": "evs",
}  # fmt: skip
SERVED = {  # what only a server has, and `manta serve` has too
    "allowed_origins", "api_key", "default_chat_template_kwargs", "host", "log_level",
    "lora_modules", "port", "reasoning_parser", "root_path", "ssl_certfile",
    "ssl_keyfile", "tool_call_parser",
}  # fmt: skip


def engine_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of EngineConfig for arguments of vLLM's `LLM`, or fields of EngineConfig themselves. Logs why one
    is ignored. Raises ConfigError for one that would change results or capacity and is not supported, and for an
    unknown one; the message names the argument."""
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name in RENAMED:
            raise ConfigError(name, value, f"written {RENAMED[name]}")
        if name in FIELDS:
            options |= _field(name, value)
        else:
            _other(options, name, value)
    backend = options.pop("all2all_backend", "auto") if options.get("data_parallel_size", 1) == 1 else "auto"
    if backend not in ("auto", "allgather_reducescatter"):
        logger.warning("all2all_backend of LLM is ignored: tokens travel only between engines that share experts")
    if isinstance(options.get("hf_overrides"), Mapping):
        options["hf_overrides"] = json.dumps(dict(options["hf_overrides"]))
    if isinstance(options.get("speculative_config"), Mapping):
        options["speculative_config"], left_out = draft_options(options["speculative_config"])
        for key, why in left_out.items():
            logger.warning("speculative_config.%s of LLM is ignored: %s", key, why)
    for flag, not_read in NOT_READ.items():
        field = flag.removeprefix("--").replace("-", "_")
        if isinstance(content := options.get(field), Mapping):
            options[field] = {key: value for key, value in content.items() if key not in not_read}
            for key in content.keys() & not_read.keys():
                logger.warning("%s.%s of LLM is ignored: %s", field, key, not_read[key])
    return options


def _field(field: str, value: Any) -> dict[str, Any]:
    """Return the field with a value of vLLM as ours, or nothing for a value that asks for the default."""
    if value is None:
        return {}
    if callable(value) and not str(value).startswith("torch."):
        raise ConfigError(field, value, "a value, not a function")
    if field == "dtype":
        value = str(value).removeprefix("torch.")
    if not isinstance(value, bool | Mapping):
        value = VALUES.get(f"--{field.replace('_', '-')}", {}).get(str(value), value)
    return {} if value is None else {field: value}


def _other(options: dict[str, Any], name: str, value: Any) -> None:
    """Treat an argument that is no field as the table of vLLM's flags says."""
    flag = f"--{name.replace('_', '-')}"
    if name in SERVED or (
        flag in NAMES and (find(flag, str(value)) or FlagRow("ignored", "", "")).note.endswith("={}")
    ):
        row: FlagRow | None = FlagRow("refused", flag, "it is an option of servers, such as `manta serve`")
        if name == "limit_mm_per_prompt":
            row = FlagRow("ignored", flag, "an offline prompt may have any number of images")
    else:
        row = find(flag, None if takes(flag) == "" else str(value)) if flag in NAMES else None
    if row is None:
        close = difflib.get_close_matches(name, FIELDS, 1)
        hint = f"; did you mean {close[0]}?" if close else ", because LLM has no such option (docs/reference.md)"
        raise ConfigError(name, value, f"left out{hint}")
    if any(value is neutral or value == neutral for neutral in NEUTRAL) or DEFAULTS.get(name) == value:
        return
    if row.effect == "ignored":
        logger.warning("%s of LLM is ignored: %s", name, in_python(row.note))
    elif row.effect == "refused":
        raise ConfigError(name, value, f"left out, because it is not supported: {in_python(row.note)}")
    else:
        _rename(options, row, value)


def _rename(options: dict[str, Any], row: FlagRow, value: Any) -> None:
    """Add a field with another name, or a key of a field that is an object."""
    flag, _, key = row.note.partition(".")
    field = flag.removeprefix("--").replace("-", "_")
    options[field] = {**options.get(field, {}), key: value} if key else value


def in_python(note: str) -> str:
    """Return a note with the names of arguments in place of flags."""

    def named(match: re.Match[str]) -> str:
        name = match[1].replace("-", "_")
        return name if name in FIELDS else match[0]

    return re.sub(r"--([a-z][a-z0-9-]*)", named, note)


def template_text(chat_template: str | Path | None) -> str | None:
    """Return a Jinja template, given as a file or as its text; None for None. Raises ConfigError."""
    if chat_template is None or (isinstance(chat_template, str) and set(chat_template) & set("{}\n")):
        return None if chat_template is None else str(chat_template)
    try:
        return Path(chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        limit = f"a file that can be read, or the text of a template ({type(error).__name__})"
        raise ConfigError("chat_template", str(chat_template), limit) from None
