"""What needs a server: structured outputs and tool calls with and without their grammar, and chats of several turns
with prefix caching, without it, and over prefill and decode pools."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import openai

from benchmarks.real_model.offline import Row
from benchmarks.real_model.texts import (
    CALLS,
    CITIES,
    FOLLOW_UPS,
    THING,
    WEATHER,
    descriptions,
    questions,
    user,
)
from tests.serve.serve_run import ServeRun

ENGINE = {"max_model_len": 2048, "kv_cache_memory_bytes": 2**29, "num_threads": 1}
TEMPLATE = Path(__file__).with_name("tools.jinja")
CLIENTS = 8
MAX_TOKENS = 200  # of an answer that does not end by itself
WITH_TOOLS = {"model": {"chat_template": str(TEMPLATE), "tool_call_parser": "hermes"}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one engine": {},
    "without a prefix cache": {"engine": ENGINE | {"enable_prefix_caching": False}},
    "prefill and decode": {"prefill": {"num_cpus": 0.1}, "handoff": {"transport": "tcp", "policy": "always"}},
}


@dataclass(frozen=True, slots=True)
class Turn:
    text: str
    ended: bool  # by itself
    first_s: float  # to the first text
    token_ms: float  # of those after it
    prompt_tokens: int
    cached_tokens: int


@contextmanager
def server(model: str, more: dict[str, dict[str, Any]]) -> Iterator[openai.OpenAI]:
    """Serve one model, as often as there are names. more: what each has beside the rest."""
    common = {"model": model, "engine": ENGINE, "decode": {"num_cpus": 0.1}}
    models = [{"name": name, **common, **own} for name, own in more.items()]
    with tempfile.TemporaryDirectory() as folder, ServeRun(Path(folder), {"models": models}) as run:
        run.wait_until_healthy(sum(1 + ("prefill" in own) for own in models))
        with openai.OpenAI(base_url=f"{run.url}/v1", api_key="none", timeout=300, max_retries=0) as client:
            yield client


def grammars(model: str) -> Iterator[Row]:
    """How many answers follow a schema, and how many calls parse, with and without a grammar."""
    with server(model, WITH_TOOLS) as client:
        yield from structured(client)
        yield from tool_calls(client)


def structured(client: openai.OpenAI) -> Iterator[Row]:
    schema = {"type": "json_schema", "json_schema": {"name": "thing", "schema": THING, "strict": True}}
    chats = [user(text) for text in descriptions()]
    for name, options in (("free", {}), ("by the grammar of its schema", {"response_format": schema})):
        answers = ask_all(client, chats, **options)
        texts = [answer.message.content or "" for answer in answers]
        parsed = sum(follows(text, {}) for text in texts)
        good = sum(follows(text, THING) for text in texts)
        yield "JSON", name, str(len(texts)), str(parsed), str(good)


def tool_calls(client: openai.OpenAI) -> Iterator[Row]:
    """Ask what wants a call; it has to parse, and to follow the schema of its tool."""
    chats = [user(call.format(city)) for call in CALLS for city in CITIES]
    schema = WEATHER["function"]["parameters"]
    for name, choice in (("free (auto)", "auto"), ("by the grammar of its tools (required)", "required")):
        answers = ask_all(client, chats, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
        calls = [answer.message.tool_calls[0].function for answer in answers if answer.message.tool_calls]
        good = sum(call.name == "get_weather" and follows(call.arguments, schema) for call in calls)
        yield "tool calls", name, str(len(answers)), str(len(calls)), str(good)


def follows(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def ask_all(client: openai.OpenAI, chats: list[list[dict[str, Any]]], **options: Any) -> list[Any]:
    def ask(chat: Any) -> Any:
        return client.chat.completions.create(
            model="model", messages=chat, temperature=0, max_tokens=MAX_TOKENS, **options
        ).choices[0]  # fmt: skip

    with ThreadPoolExecutor(CLIENTS) as clients:
        return list(clients.map(ask, chats))


def conversations(model: str, number: int) -> Iterator[Row]:
    """Chats of four turns, in which each answer is part of what comes next: CLIENTS at a time."""
    expected = None
    with server(model, LAYOUTS) as client:
        for name in LAYOUTS:
            with ThreadPoolExecutor(CLIENTS) as clients:
                asked = ((client, name, text) for text in questions(10 * number)[::10])
                found = list(clients.map(lambda arguments: converse(*arguments), asked))
            texts = [[turn.text for turn in chat] for chat in found]
            expected = expected or texts
            others = sum(a != b for a, b in zip(texts, expected, strict=True))
            turns, later = ([turn for chat in found for turn in chat[first:]] for first in (0, 1))
            ended = sum(turn.ended for turn in turns)
            cached = sum(turn.cached_tokens for turn in later) / sum(turn.prompt_tokens for turn in later)
            first_ms = 1e3 * statistics.median(turn.first_s for turn in later)
            token_ms = statistics.median(turn.token_ms for turn in turns)
            counts = f"{others} of {number}", f"{ended} of {len(turns)}"
            yield name, *counts, f"{cached:.0%}", f"{first_ms:.0f}", f"{token_ms:.1f}"


def converse(client: openai.OpenAI, model: str, question: str) -> list[Turn]:
    """Ask, and follow up; the history of a chat ends up in its next prompt as the client received it."""
    messages, turns = [], []
    for text in (question, *FOLLOW_UPS):
        messages += user(text)
        turns.append(turn := stream(client, model, messages))
        messages.append({"role": "assistant", "content": turn.text})
    return turns


def stream(client: openai.OpenAI, model: str, messages: list[dict[str, Any]]) -> Turn:
    started, times, parts, ended, usage = time.perf_counter(), [], [], False, None
    create: Any = client.chat.completions.create
    options = {"max_tokens": MAX_TOKENS, "stream": True, "stream_options": {"include_usage": True}}
    for chunk in create(model=model, messages=messages, temperature=0, **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if choice.delta.content:
                times.append(time.perf_counter() - started)
                parts.append(choice.delta.content)
            ended |= choice.finish_reason == "stop"
    assert usage is not None and usage.prompt_tokens_details is not None
    each = 1e3 * (times[-1] - times[0]) / max(1, usage.completion_tokens - 1)
    cached = usage.prompt_tokens_details.cached_tokens or 0
    return Turn("".join(parts), ended, times[0], each, usage.prompt_tokens, cached)
