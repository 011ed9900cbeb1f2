"""Streams one after another from many clients while versions are changed, with the tokens of each and its borders."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise, takewhile
from typing import Any

import httpx
import msgspec

from tests.serve.chaos_load import carry_out
from tests.serve.version_cluster import AS_OPERATOR, AS_STREAMS

WORDS = ("ocean", "lamp", "winter", "dog", "music", "river", "stone", "letter")
LIMIT_S = 1800.0
CLIENTS = 8


@dataclass(frozen=True, slots=True)
class Ask:
    """What one stream asks for. Its prompt is unique among those of a load."""

    prompt: str
    tokens: int
    seed: int | None

    def body(self, prompt: str | list[int], tokens: int) -> dict[str, Any]:
        """Return a request with another prompt, for so many tokens."""
        drawn = {"temperature": 0} if self.seed is None else {"temperature": 1.0, "seed": self.seed}
        said = {"return_token_ids": True, "usage": {"include": True}}
        return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **said, **drawn}


def asks(tokens: int) -> list[Ask]:
    """Return sixteen: greedy and seeded ones."""
    return [Ask(f"The {word} is", tokens, seed) for word in WORDS for seed in (None, len(word))]


@dataclass(slots=True)
class Answer:
    """tokens: of its text. borders: numbers of tokens after which it went on with other numerics. compute_s: what it
    has cost, in seconds of engines."""

    ask: Ask
    asked_at: float
    tokens: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    borders: list[int] = field(default_factory=list)
    compute_s: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    problem: str | None = None

    async def run(self, client: httpx.AsyncClient, salt: str) -> None:
        """Whatever goes wrong is in `problem`."""
        body = self.ask.body(self.ask.prompt, self.ask.tokens) | {"cache_salt": salt}
        try:
            async with client.stream(
                "POST", "/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
            ) as response:
                if response.status_code != 200:
                    self.problem = f"{response.status_code} {(await response.aread()).decode()}"
                    return
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        self._take(msgspec.json.decode(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            self.problem = repr(error)
        if self.problem is None and len(self.tokens) != self.ask.tokens:
            self.problem = f"the stream ended after {len(self.tokens)} of {self.ask.tokens} tokens"

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.problem = str(event["error"])
        for choice in event.get("choices", ()):
            self.arrivals.append(time.monotonic())
            self.tokens += choice.get("token_ids") or []
            self.prompt = self.prompt or choice.get("prompt_token_ids") or []
        if usage := event.get("usage"):
            self.borders = [border["tokens"] for border in usage.get("numerics_borders", ())]
            self.compute_s = usage["cost_details"]["compute_seconds"]


@dataclass(slots=True)
class Load:
    answers: list[Answer] = field(default_factory=list)
    change_s: float = 0.0

    @property
    def problems(self) -> list[str]:
        return [answer.problem for answer in self.answers if answer.problem]

    @property
    def crossed(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.borders]

    @property
    def compute_s(self) -> float:
        return sum(answer.compute_s for answer in self.answers)

    @property
    def first_token_s(self) -> list[float]:
        return [answer.arrivals[0] - answer.asked_at for answer in self.answers if answer.arrivals]

    @property
    def between_tokens_s(self) -> list[float]:
        return [after - before for answer in self.answers for before, after in pairwise(answer.arrivals)]

    def line(self, what: str) -> str:
        """A row of a table: streams, failed, those with a border, P50 and P99 in milliseconds."""
        crossed = len(self.crossed)
        times = " | ".join(
            f"{1000 * percentile(seconds, share):.0f}"
            for seconds in (self.first_token_s, self.between_tokens_s)
            for share in (0.5, 0.99)
        )
        return f"| {what} | {len(self.answers)} | {len(self.problems)} | {crossed} | {times} | {self.change_s:.0f} |"


HEADING = (
    "| | streams | failed | with a border | first token, P50 | P99 | between tokens, P50 | P99 | s |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def percentile(seconds: Sequence[float], share: float) -> float:
    ordered = sorted(seconds)
    return ordered[int(share * (len(ordered) - 1) + 0.5)] if ordered else float("nan")


def run_load(
    url: str, wanted: Sequence[Ask], at_least: int, change: Callable[[], None] = lambda: None, clients: int = CLIENTS
) -> Load:
    """Ask until `change`, called once each client has a token, has returned, and at least so many streams have ended.
    What one client asks for first, others ask for later."""
    return asyncio.run(asyncio.wait_for(_run(url, wanted, at_least, change, clients), LIMIT_S))


async def _run(url: str, wanted: Sequence[Ask], at_least: int, change: Callable[[], None], clients: int) -> Load:
    load, changed, numbers = Load(), asyncio.Event(), count()
    salt = str(time.monotonic_ns())

    async def one_client(client: httpx.AsyncClient) -> None:
        while (number := next(numbers)) < at_least or not changed.is_set():
            answer = Answer(wanted[number % len(wanted)], time.monotonic())
            load.answers.append(answer)
            await answer.run(client, f"{salt}-{number}")

    async def one_change() -> None:
        while sum(bool(answer.arrivals or answer.problem) for answer in load.answers) < clients:
            await asyncio.sleep(0.01)
        load.change_s = await carry_out(change, changed)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, limits=limits, headers=AS_STREAMS) as client:
        await asyncio.gather(one_change(), *(one_client(client) for _ in range(clients)))
    return load


def other_texts(load: Load, versions: Sequence[Sequence[Answer]]) -> list[str]:
    """Return what is wrong with the texts of a load. versions: the answers of each version alone.

    A text without a border is that of one version. With borders, its first part is. The parts after it are told by
    `continued`.
    """
    known = [{answer.ask: answer.tokens for answer in answers} for answers in versions]
    wrong = []
    for answer in load.answers:
        end = answer.borders[0] if answer.borders else len(answer.tokens)
        texts = [tokens[answer.ask] for tokens in known]
        if all(text[:end] != answer.tokens[:end] for text in texts):
            same = max(
                sum(1 for _ in takewhile(lambda p: p[0] == p[1], zip(t, answer.tokens, strict=False))) for t in texts
            )
            wrong.append(f"{answer.ask}: {same} of {len(answer.tokens)} tokens are the same, borders {answer.borders}")
    return wrong


def ask_all(url: str, prompts: Sequence[tuple[list[int], int]]) -> list[list[int]]:
    """Return the tokens with which a prompt is continued greedily, so many of them, for each prompt."""
    return asyncio.run(asyncio.wait_for(_ask_all(url, prompts), LIMIT_S))


async def _ask_all(url: str, prompts: Sequence[tuple[list[int], int]]) -> list[list[int]]:
    room = asyncio.Semaphore(CLIENTS)

    async def ask(client: httpx.AsyncClient, prompt: list[int], tokens: int) -> list[int]:
        async with room:
            answer = await client.post("/v1/completions", json=Ask("", tokens, None).body(prompt, tokens))
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found

    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, headers=AS_OPERATOR) as client:
        return list(await asyncio.gather(*(ask(client, prompt, tokens) for prompt, tokens in prompts)))
