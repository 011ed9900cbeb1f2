"""The sampling parameters that a model's authors recommend in its generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.errors import ConfigError
from engine.model.checkpoint.folder import generation_config, read_json

RECOMMENDED_FIELDS = {  # of generation_config.json, by their names in SamplingParams
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "max_tokens": "max_new_tokens",
}  # fmt: skip
# fields that may be overridden without effect, as in vLLM
WITHOUT_EFFECT = ("bos_token_id", "do_sample", "eos_token_id", "max_length", "pad_token_id", "transformers_version")


def default_sampling(
    folder: Path, source: str = "auto", override: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the default sampling parameters, by their names in SamplingParams.

    source: `auto` for what the model's authors recommend in its generation_config.json, `vllm` for nothing, or a folder
    with another such file. override: fields of the file that take precedence. Raises ConfigError for an unknown one.
    """
    for name in override:
        if name not in (*RECOMMENDED_FIELDS.values(), *WITHOUT_EFFECT):
            limit = f"one of {', '.join(RECOMMENDED_FIELDS.values())}"
            raise ConfigError("override_generation_config", name, limit)
    own = {} if source == "vllm" else generation_config(folder if source == "auto" else Path(source))
    if source not in ("auto", "vllm"):
        read_json(Path(source), "generation_config.json")  # raises if it is missing
    given = {name: override.get(field, own.get(field)) for name, field in RECOMMENDED_FIELDS.items()}
    return {name: value for name, value in given.items() if value is not None}
