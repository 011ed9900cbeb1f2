"""Requests of a measurement. Imports little, so that `manta bench --help`, which lists these options, is fast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from cluster.cli.bench.prompts import BenchRequest, preset, random_jobs, with_prefixes
from cluster.config.idle_flags import given_flags, refuse_idle
from cluster.flags import flag
from engine.errors import InvalidParameter

if TYPE_CHECKING:  # numpy
    from cluster.lab.simulator.conversations.turn import Turn

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineLoad:
    PANEL: ClassVar = "Load"
    workload: str | None = flag(
        None,
        "A preset in place of the four options below. Its token ids can be given to other engines too. "
        "W1: 64 x 128 in, 64 out (Qwen3: 16 x 256 in, 64 out). W2: one stream, 128 in, 128 out. The model needs a "
        "vocabulary of 31,000.",
    )
    requests: int = flag(64, "Number of requests; all start at once.", min=1)
    input_len: int = flag(128, "Tokens per prompt.", min=1)
    output_len: int = flag(64, "Tokens per answer.", min=1)
    seed: int = flag(0, "Seed of the random prompts.")
    repetitions: int = flag(5, "Repetitions, each with new prompts.", min=1)
    warmup: int = flag(1, "Repetitions before the measured ones.", min=0)

    def check_flags(self) -> None:
        """Raise InvalidParameter for a flag that would be ignored."""
        fixed = "--requests --input-len --output-len --seed"
        refuse_idle(given_flags(self), (fixed, self.workload is not None, "with --workload, which sets it"))

    def batch(self, number: int, model: str, vocab_size: int) -> list[BenchRequest]:
        if self.workload:
            return preset(self.workload, model, number)
        return random_jobs(self.requests, self.input_len, self.output_len, vocab_size, self.seed, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLoad:
    PANEL: ClassVar = "Load"
    endpoint: str = flag("completions", "completions or chat.")
    num_prompts: int = flag(100, "Requests to send.", min=1)
    request_rate: float = flag(math.inf, "Requests per second; inf sends all at once.")
    burstiness: float = flag(1.0, "Shape of the arrivals: 1 is a Poisson process, below 1 in bursts, above 1 evenly.")
    max_concurrency: int | None = flag(
        None, "Maximum number of requests under way; the others wait in the client, unmeasured.", min=1
    )
    input_len: int = flag(128, "Tokens of a prompt after its shared prefix.", min=1)
    output_len: int = flag(64, "Tokens per answer.", min=1)
    prefix_len: int = flag(0, "Tokens of the shared prefix.", min=0)
    prefix_groups: int = flag(1, "Number of different prefixes; prompts take turns.", min=1)
    text: bool = flag(False, "Send English words, not token ids; chat always does.", "--text")
    vocab_size: int = flag(
        1000, "Draw token ids below this number, which must not exceed the model's vocabulary.", min=2
    )
    temperature: float = flag(0.0, "0 is greedy.", min=0)
    ignore_eos: bool = flag(True, "Ask for the full length (`ignore_eos`); some servers do not know this field.")
    num_warmups: int = flag(0, "Requests sent one after another before the clock starts.", min=0)
    seed: int = flag(0, "Seed of the random prompts.")
    scale: float = flag(1.0, "Factor of all tokens of --trace, at most 1: 0.01 sends a hundredth.")
    time_scale: float = flag(
        1.0, "Factor of the times of --trace, pauses of conversations included: 0.1 is ten times as fast."
    )
    max_active_conversations: int | None = flag(
        None, "Conversations of --trace at a time; each of the others begins as another ends.", min=1
    )

    def __post_init__(self) -> None:
        if self.endpoint not in PATHS:
            raise InvalidParameter("endpoint", self.endpoint, f"one of {', '.join(PATHS)}")
        for name in ("request_rate", "burstiness"):
            if not getattr(self, name) > 0:
                raise InvalidParameter(name, getattr(self, name), "above 0")

    def check_flags(self) -> None:
        """Raise InvalidParameter for a flag that would be ignored."""
        sends_words = self.text or self.endpoint == "chat"
        refuse_idle(
            given_flags(self),
            ("--burstiness", math.isinf(self.request_rate), "without --request-rate: all requests are sent at once"),
            ("--prefix-groups", not self.prefix_len, "without --prefix-len"),
            ("--vocab-size", sends_words, "with --text or --endpoint chat, which send words"),
            ("--scale --time-scale --max-active-conversations", True, "without --trace"),
        )

    @property
    def path(self) -> str:
        return PATHS[self.endpoint]

    @property
    def turns(self) -> Sequence[Turn] | None:
        """What each request waits for; None if all are sent at their times."""
        return None

    def bodies(self, model: str) -> list[bytes]:
        """Return the bodies of all requests, warm-ups first, so that nothing is computed while the server is
        measured."""
        prompts = with_prefixes(
            self.num_warmups + self.num_prompts, self.input_len, self.prefix_len, self.prefix_groups, self.vocab_size,
            self.seed, text=self.text or self.endpoint == "chat",
        )  # fmt: skip
        return [msgspec.json.encode(self._body(model, prompt, self.output_len)) for prompt in prompts]

    def times(self) -> list[float]:
        """Return the seconds from the start at which requests are sent."""
        from cluster.arrivals import arrival_times  # numpy

        return arrival_times(self.num_prompts, self.request_rate, self.burstiness, self.seed)

    def full_output(self, completed: int) -> int:
        """Return the output tokens of so many completed requests, if answers have the full length."""
        return completed * self.output_len

    def _body(self, model: str, prompt: list[int] | str, max_tokens: int) -> dict[str, Any]:
        chat = {"messages": [{"role": "user", "content": prompt}]}
        return {
            "model": model,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **(chat if self.endpoint == "chat" else {"prompt": prompt}),
            **({"ignore_eos": True} if self.ignore_eos else {}),  # an extension, which strict servers refuse
        }
