"""Sampling parameters of a request. Names, meaning and ranges follow vLLM's SamplingParams."""

from __future__ import annotations

import hashlib
import math

import msgspec

from engine.errors import InvalidParameter
from engine.wire.part_record import Records
from engine.wire.structured_outputs import StructuredOutputsParams

MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1000  # text that may begin a stop string is searched again with every token
MAX_BAD_WORDS = 1000
MAX_BAD_WORD_CHARS = 1000


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of a request. Raises InvalidParameter for a value out of its range."""

    n: int = 1
    temperature: float = 1.0
    """0 is greedy; then top_p, top_k and min_p have no effect."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 for no limit."""
    min_p: float = 0.0
    seed: int | None = None
    """None lets the engine derive one from the request id."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    """Words that must not be produced."""
    bad_words_token_ids: list[list[int]] = []
    """Token sequences of `bad_words`, filled in by the process that has the tokenizer."""
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None for as many as fit the context."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Number of most likely alternatives to report besides the token itself."""
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    extra_args: Records = {}
    """What it asks of parts that change logits besides. It goes wherever the sequence is sampled."""

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_lists()

    def _check_ranges(self) -> None:
        check(1 <= self.n <= MAX_N, "n", self.n, f"between 1 and {MAX_N}")
        check(0.0 <= self.temperature < math.inf, "temperature", self.temperature, "a finite number, 0 or above")
        check(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1")
        check(self.top_k >= -1, "top_k", self.top_k, "-1 or 0 (no limit), or at least 1")
        check(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "between 0 and 1")
        check(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit integer")
        check(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", self.presence_penalty, "between -2 and 2")
        check(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", self.frequency_penalty, "between -2 and 2")
        valid = self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty)
        check(valid, "repetition_penalty", self.repetition_penalty, "a finite number above 0")
        check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        check(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        enough = self.max_tokens is None or self.min_tokens <= self.max_tokens
        check(enough, "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            check(value is None or 0 <= value <= MAX_LOGPROBS, name, value, f"between 0 and {MAX_LOGPROBS}")

    def _check_lists(self) -> None:
        check(len(self.stop) <= MAX_STOP_STRINGS, "stop", self.stop, f"at most {MAX_STOP_STRINGS} strings")
        limit = f"strings of at most {MAX_STOP_CHARS} characters"
        check(all(len(stop) <= MAX_STOP_CHARS for stop in self.stop), "stop", self.stop, limit)
        check("" not in self.stop, "stop", self.stop, "a list of non-empty strings")
        limit = f"at most {MAX_BAD_WORDS} words of at most {MAX_BAD_WORD_CHARS} characters"
        short = all(len(word) <= MAX_BAD_WORD_CHARS for word in self.bad_words)
        check(len(self.bad_words) <= MAX_BAD_WORDS and short, "bad_words", self.bad_words, limit)
        check("" not in self.bad_words, "bad_words", self.bad_words, "a list of non-empty strings")
        check(all(t >= 0 for t in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "token ids, 0 or above")
        check(self.allowed_token_ids != [], "allowed_token_ids", self.allowed_token_ids, "a list of at least one id")
        for token, bias in (self.logit_bias or {}).items():
            check(-100.0 <= bias <= 100.0, f"logit_bias[{token}]", bias, "between -100 and 100")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def sequence(self, index: int) -> SamplingParams:
        """Return the parameters of the sequence with this index among `n`. Each gets its own seed; otherwise all would
        be alike."""
        if self.n == 1:
            return self
        # signed 64-bit integers wrap around
        seed = None if self.seed is None else (self.seed + index + 2**63) % 2**64 - 2**63
        return msgspec.structs.replace(self, n=1, seed=seed)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidParameter for a token id that the model does not have."""
        lists = {
            "logit_bias": list(self.logit_bias or {}),
            "allowed_token_ids": self.allowed_token_ids or [],
            "stop_token_ids": self.stop_token_ids,
            "bad_words": [token for word in self.bad_words_token_ids for token in word],
        }
        for field, ids in lists.items():
            unknown = next((token for token in ids if not 0 <= token < vocab_size), None)
            check(unknown is None, field, unknown, f"a token id below {vocab_size}")


def check(valid: bool, field: str, value: object, limit: str) -> None:
    """Raise InvalidParameter unless `valid` (NaN fails every comparison, so it is never valid)."""
    if not valid:
        raise InvalidParameter(field, value, limit)


def seed_of(request_id: str) -> int:
    """Return the 64-bit seed of a request without one. The seed is the same wherever the request runs again."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")
