"""The oracle of parts that change logits: the same, one sequence after the other, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.wire.parts.thinking_budget import ThinkingBudget
from engine.wire.sampling_params import SamplingParams

BANNED = float("-inf")


def process(logits: Tensor, params: SamplingParams, prompt: Tensor, output: Tensor, eos: frozenset[int]) -> None:
    """Change `logits` [vocab] float32 in place. prompt, output: [n] int64 token ids so far."""
    if params.allowed_token_ids:
        allowed = torch.tensor(params.allowed_token_ids)
        kept = logits[allowed]
        logits.fill_(BANNED)
        logits[allowed] = kept
    for token in banned_by_words(params.bad_words_token_ids, output):
        logits[token] = BANNED
    if len(output) < params.min_tokens:
        logits[sorted(eos | set(params.stop_token_ids))] = BANNED
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    apply_penalties(logits, params, prompt, output)
    budget = ThinkingBudget.of(params)
    if must_close(budget, output.tolist()) and logits[budget.close].isfinite():
        kept = logits[budget.close].clone()
        logits.fill_(BANNED)
        logits[budget.close] = kept


def must_close(budget: ThinkingBudget | None, output: list[int]) -> bool:
    """Whether the budget for reasoning is spent, and the reasoning goes on."""
    if budget is None or not 0 <= len(output) - budget.ends_at < 4 or {budget.close, budget.call} & {*output}:
        return False
    return budget.open is None or output[0] == budget.open


def banned_by_words(words: list[list[int]], output: Tensor) -> list[int]:
    """Tokens that would complete one of `words`."""
    longest = max((len(word) for word in words), default=1) - 1
    tail = output[-longest:].tolist() if longest else []
    possible = [word for word in words if 0 < len(word) <= len(tail) + 1]
    return [word[-1] for word in possible if tail[len(tail) - len(word) + 1 :] == word[:-1]]


def apply_penalties(logits: Tensor, params: SamplingParams, prompt: Tensor, output: Tensor) -> None:
    if params.repetition_penalty != 1.0:
        seen = torch.unique(torch.cat([prompt, output]))
        score = logits[seen]
        logits[seen] = torch.where(score > 0, score / params.repetition_penalty, score * params.repetition_penalty)
    if (params.frequency_penalty or params.presence_penalty) and len(output):
        seen, counts = torch.unique(output, return_counts=True)
        logits[seen] -= params.frequency_penalty * counts + params.presence_penalty
