"""Reads adapter_config.json as PEFT writes it, as far as an adapter's arithmetic depends on it."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import Described
from engine.lora.errors import AdapterError, AdapterNotFound
from engine.lora.module_patterns import MAX_LENGTH, ModulePatterns

logger = logging.getLogger(__name__)

CONFIG_FILE = "adapter_config.json"
LEFT_OUT = "left out: "
MERGE = "merge the adapter into the model instead"
READ = {
    "alpha_pattern",
    "base_model_name_or_path",
    "bias",
    "init_lora_weights",
    "lora_alpha",
    "peft_type",
    "peft_version",
    "r",
    "rank_pattern",
    "use_rslora",
}
"""Keys of PEFT's LoraConfig on which an adapter's arithmetic depends, and that of who trained it."""
UNSUPPORTED = {
    "use_dora": f"DoRA scales each output by a norm of the merged weight; {MERGE}",
    "modules_to_save": f"whole modules in an adapter are not supported; {MERGE}",
    "trainable_token_indices": f"embeddings of single tokens are not supported; {MERGE}",
    "alora_invocation_tokens": "an adapter applies to all tokens of a request",
    "layer_replication": "an adapter cannot repeat layers of the served model",
    "lora_bias": f"biases in an adapter are not supported; {MERGE}",
    "use_qalora": "QA-LoRA, which pools the inputs of an adapter, is not supported",
    "use_bdlora": "block-diagonal adapters are not supported",
    "kasa_config": f"KaSA changes the model's own weights; {MERGE}",
    "arrow_config": "routing between adapters is not supported",
    "monteclora_config": "MonteCLoRA, which draws its weights at random, is not supported",
}
"""Keys of what is not computed here, with the reason; anything but null, false and empty is refused."""
HARMLESS = {
    # which modules were trained; the tensors say it
    *("target_modules", "exclude_modules", "target_parameters", "layers_to_transform", "layers_pattern"),
    # how they were trained, initialized or stored
    *("task_type", "inference_mode", "auto_mapping", "revision", "lora_dropout", "fan_in_fan_out", "megatron_config"),
    *("megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"),
    *("runtime_config", "ensure_weight_tying", "qalora_group_size"),
}
"""Keys that do not change what an adapter computes, whatever their value."""
UNKNOWN_VARIANT = "left out: Manta does not know this variant of LoRA"
UNCHANGED_BASES = ("gaussian", "orthogonal", "eva", "mica")
"""Values of init_lora_weights, besides true and false, that leave the model's own weights as they are."""
CONVERTED = (
    f"true, false, {', '.join(UNCHANGED_BASES)}: others change the model's own weights; convert the adapter "
    "(path_initial_model_for_weight_conversion of PEFT's save_pretrained)"
)
MAX_CONFIG_BYTES = 16 << 20
MAX_ALPHA = 1e6
MAX_RANK = 65_536


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The keys of adapter_config.json on which an adapter's arithmetic depends, under PEFT's names."""

    adapter: str
    """The adapter's name in errors."""
    alpha_pattern: ModulePatterns
    """Alpha by module, instead of `lora_alpha`."""
    rank_pattern: ModulePatterns
    """Rank by module, instead of `r`."""
    lora_alpha: float
    r: int
    use_rslora: bool = False
    """Divides alpha by the square root of the rank (arXiv:2312.03732)."""
    may_be_swapped: bool = False
    """Whether a version of PEFT before 0.19 may have written the adapter. These exchanged inputs and outputs of
    parameters that hold all experts as [experts, outputs, inputs]."""
    base_model: str = ""
    """Name of the model that the adapter was trained on, as given by its trainer. Only shown to people."""

    @classmethod
    def read(cls, folder: Path, adapter: str) -> AdapterConfig:
        """Read the file in `folder`. Raises AdapterError, naming `adapter`, if the engine would compute something else
        than the adapter's training did."""
        raw = _read_object(folder / CONFIG_FILE, adapter)
        _check(raw, adapter)
        return cls(
            adapter,
            _patterns(raw, "alpha_pattern", _alpha, adapter),
            _patterns(raw, "rank_pattern", _rank, adapter),
            lora_alpha=_alpha(adapter, "lora_alpha", raw.get("lora_alpha", 8)),
            r=_rank(adapter, "r", raw.get("r", 8)),
            use_rslora=bool(raw.get("use_rslora")),
            may_be_swapped=_version(raw.get("peft_version")) < (0, 19),
            base_model=str(raw.get("base_model_name_or_path") or ""),
        )

    @property
    def arithmetic(self) -> bytes:
        """The keys that affect what the adapter computes, encoded so that equal meaning gives equal bytes."""
        return json.dumps([self.lora_alpha, self.use_rslora, list(self.alpha_pattern.numbers.items())]).encode()

    def check_rank(self, module: str, rank: int) -> None:
        """Raise AdapterError unless a module's tensors have the rank that the configuration gives it. With another one
        its scale would be wrong."""
        pattern = self.rank_pattern.number(module)
        if rank != (self.r if pattern is None else pattern):
            field, named = ("r", self.r) if pattern is None else ("rank_pattern", pattern)
            limit = f"{rank}, the rank of the tensors of {module[:MAX_LENGTH]}"
            raise AdapterError(self.adapter, field, named, limit)

    def scale(self, module: str, rank: int) -> float:
        """Return the factor by which a module multiplies the product of B and A. rank: rank of the module's tensors."""
        pattern = self.alpha_pattern.number(module)
        return (self.lora_alpha if pattern is None else pattern) / (math.sqrt(rank) if self.use_rslora else rank)


def _read_object(file: Path, adapter: str) -> dict[str, Any]:
    try:
        if (size := file.stat().st_size) > MAX_CONFIG_BYTES:
            raise AdapterError(adapter, file.name, Described(f"{size} bytes"), f"at most {MAX_CONFIG_BYTES} bytes")
        raw = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise AdapterNotFound(adapter, file.name, str(file.parent), "in the folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(adapter, file.name, str(error), "readable JSON") from None
    if not isinstance(raw, dict):
        raise AdapterError(adapter, file.name, raw, "a JSON object")
    return raw


def _check(raw: dict[str, Any], adapter: str) -> None:
    if raw.get("peft_type") != "LORA":
        raise AdapterError(adapter, "peft_type", raw.get("peft_type"), "LORA: other adapters are not supported")
    for key, value in raw.items():
        if value and key in UNSUPPORTED:
            raise AdapterError(adapter, key, value, LEFT_OUT + UNSUPPORTED[key])
        if value and key not in READ | HARMLESS:
            if key.startswith("use_") or key.endswith("_config"):  # as PEFT names variants
                raise AdapterError(adapter, key, value, UNKNOWN_VARIANT)
            logger.warning("adapter %s: nothing reads %s of its configuration", adapter, key[:MAX_LENGTH])
    if raw.get("bias") not in (None, "none"):
        raise AdapterError(adapter, "bias", raw["bias"], f"none: biases in an adapter are not supported; {MERGE}")
    init = raw.get("init_lora_weights")
    if not (init is None or isinstance(init, bool) or str(init).lower() in UNCHANGED_BASES):
        raise AdapterError(adapter, "init_lora_weights", init, CONVERTED)


def _version(version: object) -> tuple[int, int]:
    """Return major and minor version; 0.0 for versions of PEFT that do not write theirs."""
    match = re.match(r"(\d+)\.(\d+)", str(version))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _alpha(adapter: str, field: str, value: object) -> float:
    # whole numbers are compared as they are: they may be too large for a float
    if isinstance(value, bool) or not isinstance(value, int | float) or not -MAX_ALPHA <= value <= MAX_ALPHA:
        raise AdapterError(adapter, field, value, f"a number of at most {MAX_ALPHA:g}")
    return float(value)


def _rank(adapter: str, field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANK:
        raise AdapterError(adapter, field, value, f"a whole number from 1 to {MAX_RANK}")
    return value


def _patterns(
    raw: dict[str, Any], field: str, number: Callable[[str, str, object], float], adapter: str
) -> ModulePatterns:
    """number: checks a value of the object, whose path it is given for errors."""
    patterns = raw.get(field) or {}
    if not isinstance(patterns, dict):
        raise AdapterError(adapter, field, patterns, "a JSON object from names to numbers")
    numbers = {key: number(adapter, f"{field}[{key[:MAX_LENGTH]!r}]", value) for key, value in patterns.items()}
    return ModulePatterns(adapter, field, numbers)
