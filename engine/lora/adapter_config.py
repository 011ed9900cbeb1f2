"""Reads adapter_config.json as PEFT writes it, as far as an adapter's arithmetic depends on it."""

from __future__ import annotations

import json
import logging
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import AdapterError, AdapterNotFound

logger = logging.getLogger(__name__)

CONFIG_FILE = "adapter_config.json"
LEFT_OUT = "left out: "
MERGE = "merge the adapter into the model instead"
# keys of what is not computed here, with the reason; anything but null, false and empty is refused
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
UNKNOWN_VARIANT = "left out: Manta does not know this variant of LoRA"
CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")  # values of init_lora_weights


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The keys of adapter_config.json on which an adapter's arithmetic depends, under PEFT's names."""

    lora_alpha: float = 8
    use_rslora: bool = False
    """Divides alpha by the square root of the rank (arXiv:2312.03732)."""
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    """Alpha by module. A key is the end of a module's name, or a regular expression for it; the first key that matches
    decides."""
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
        config = cls(
            lora_alpha=_number(raw, "lora_alpha", 8, adapter),
            use_rslora=bool(raw.get("use_rslora")),
            alpha_pattern=_patterns(raw, "alpha_pattern", adapter),
            may_be_swapped=_version(raw.get("peft_version")) < (0, 19),
            base_model=str(raw.get("base_model_name_or_path") or ""),
        )
        init = raw.get("init_lora_weights")
        if isinstance(init, str) and init.startswith(CHANGED_BASES):
            logger.warning(
                "adapter %s was trained with init_lora_weights=%s, which changes the model's own weights; "
                "its output is right only if it was converted when it was saved",
                adapter, init,
            )  # fmt: skip
        return config

    @property
    def arithmetic(self) -> bytes:
        """The keys that affect what the adapter computes, encoded so that equal meaning gives equal bytes."""
        return json.dumps([self.lora_alpha, self.use_rslora, list(self.alpha_pattern.items())]).encode()

    def scale(self, module: str, rank: int) -> float:
        """Return the factor by which a module multiplies the product of B and A. rank: rank of the module's tensors."""
        patterns = self.alpha_pattern.items()
        alpha = next((a for key, a in patterns if re.match(rf"(.*\.)?({key})$", module)), self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _read_object(file: Path, adapter: str) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise AdapterNotFound(adapter, file.name, str(file.parent), "in the folder") from None
    except (OSError, ValueError) as error:
        raise AdapterError(adapter, file.name, str(error), "readable JSON") from None
    if not isinstance(raw, dict):
        raise AdapterError(adapter, file.name, raw, "a JSON object")
    return raw


def _check(raw: dict[str, Any], adapter: str) -> None:
    if raw.get("peft_type") != "LORA":
        raise AdapterError(adapter, "peft_type", raw.get("peft_type"), "LORA: other adapters are not supported")
    for key, value in raw.items():
        if value and (key in UNSUPPORTED or key.startswith("use_")) and key != "use_rslora":
            why = LEFT_OUT + UNSUPPORTED[key] if key in UNSUPPORTED else UNKNOWN_VARIANT
            raise AdapterError(adapter, key, value, why)
    if raw.get("bias") not in (None, "none"):
        raise AdapterError(adapter, "bias", raw["bias"], f"none: biases in an adapter are not supported; {MERGE}")


def _version(version: object) -> tuple[int, int]:
    """Return major and minor version; 0.0 for versions of PEFT that do not write theirs."""
    match = re.match(r"(\d+)\.(\d+)", str(version))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _number(raw: dict[str, Any], key: str, default: float, adapter: str) -> float:
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise AdapterError(adapter, key, value, "a number")
    return value


def _patterns(raw: dict[str, Any], key: str, adapter: str) -> dict[str, float]:
    patterns = raw.get(key) or {}
    if not isinstance(patterns, dict):
        raise AdapterError(adapter, key, patterns, "a JSON object from names to numbers")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise AdapterError(adapter, key, pattern, f"names or regular expressions ({error})") from None
    return {pattern: _number(patterns, pattern, 0, adapter) for pattern in patterns}
