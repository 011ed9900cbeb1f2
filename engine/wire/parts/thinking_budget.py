"""Budgets of reasoning."""

from __future__ import annotations

from typing import ClassVar, Self

import msgspec

from engine.errors import RequestError
from engine.wire.part_record import PartRecord, record_in
from engine.wire.sampling_params import SamplingParams, check


class ThinkingBudget(PartRecord, frozen=True):
    """Limit on the length of the reasoning that begins an output, in terms of the model's reasoning tags. Set from
    vLLM's `thinking_token_budget` by the process that has the tokenizer."""

    part: ClassVar[str] = "thinking_budget"

    tokens: int
    """Reasoning tokens, without tags, after which the end of the reasoning is forced."""
    close: int
    """Token that ends the reasoning."""
    open: int | None = None
    """Token that begins the reasoning, first in the output; None if the prompt ends inside the reasoning."""
    call: int | None = None
    """Token that begins a tool call, which ends the reasoning too; None if there are no tools."""

    def __post_init__(self) -> None:
        check(self.tokens >= 0, "thinking_token_budget", self.tokens, "at least 0")

    @classmethod
    def of(cls, params: SamplingParams) -> Self | None:
        """Return the budget of a request; None if it has none. Raises RequestError if it has another form."""
        try:
            return record_in(params.extra_args, cls)
        except msgspec.ValidationError as error:
            raise RequestError(f"the record of {cls.part} is not valid: {error}") from None

    @property
    def ends_at(self) -> int:
        """Last output position at which `close` is allowed to come."""
        return self.tokens if self.open is None else self.tokens + 1

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidParameter for a tag that the model does not have."""
        for tag in (self.open, self.close, self.call):
            known = tag is None or 0 <= tag < vocab_size
            check(known, self.part, tag, f"a token id below {vocab_size}")
