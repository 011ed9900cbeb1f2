"""Options of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Literal

from engine.config_options import option
from engine.engine_options import EngineOptions
from engine.errors import ConfigError
from engine.options.choices import check_choices
from engine.options.section import set_section

MAX_SPECULATIVE_TOKENS = 32  # per sequence and step; more never save time


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Options of speculative decoding, named as in vLLM (docs/speculative_decoding.md)."""

    method: Literal["ngram", "suffix", "draft_model", "eagle3", "mtp"] = field(
        metadata={
            "help": "`ngram` looks for the newest tokens earlier in prompt and output, and proposes the tokens "
            "that followed there. `suffix` also looks in earlier answers, and proposes the most frequent continuation. "
            "The other methods have weights: a smaller model, or heads that read this model's hidden states."
        }
    )
    model: str | None = option(None, "`draft_model` and `eagle3`: folder or Hub id of the weights.")
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
        check_choices(self, "speculative_config.")
        if not 1 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            limit = f"between 1 and {MAX_SPECULATIVE_TOKENS}"
            raise ConfigError("speculative_config.num_speculative_tokens", self.num_speculative_tokens, limit)
        needs_model = self.method in ("draft_model", "eagle3")
        if needs_model != (self.model is not None):
            limit = f"{'given' if needs_model else 'left out'} with method {self.method}"
            raise ConfigError("speculative_config.model", self.model, limit)
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            limit = f"at least 1, and at most prompt_lookup_max ({self.prompt_lookup_max})"
            raise ConfigError("speculative_config.prompt_lookup_min", self.prompt_lookup_min, limit)
        for key, fits, limit in (
            ("max_tree_depth", self.suffix_decoding_max_tree_depth >= 2, "at least 2"),
            ("max_cached_requests", self.suffix_decoding_max_cached_requests >= 0, "at least 0"),
            ("max_spec_factor", 0 < self.suffix_decoding_max_spec_factor < inf, "above 0"),
            ("min_token_prob", 0 <= self.suffix_decoding_min_token_prob <= 1, "between 0 and 1"),
        ):
            if not fits:
                raise ConfigError(
                    f"speculative_config.suffix_decoding_{key}", getattr(self, f"suffix_decoding_{key}"), limit
                )

    @property
    def has_weights(self) -> bool:
        """Whether a second model on the device makes the drafts."""
        return self.method not in ("ngram", "suffix")


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions(EngineOptions):
    speculative_config: SpeculativeConfig | None = option(
        None, "Speculative decoding, as a JSON object of vLLM's keys (docs/speculative_decoding.md)."
    )

    def check(self) -> None:
        super().check()
        set_section(self, "speculative_config", SpeculativeConfig)
