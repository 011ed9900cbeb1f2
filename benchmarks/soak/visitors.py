"""Clients that ask for answers in all ways and leave many of them, for as long as it takes."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.resuming_client import NOBODY_THERE, ResumingClient

MODEL, ADAPTER = "pocket", "pirate"
FREE, LIMITED = "free", "limited"  # API keys without and with limits
LIMIT_S = 300.0  # for each request: longer is hanging
PAUSE_S = 1.0  # before a client comes again that was turned away, and at most between two turns of an agent
TURNS = 4  # of an agent
ENDED = ("completed", "failed", "expired", "cancelled")
WORDS = ["ocean", "lamp", "winter", "dog", "music", "river", "stone", "letter"]
LONG = " and ".join(WORDS) * 12
BODIES: list[dict[str, Any]] = [
    {"prompt": f"The {word} {'is' if i % 2 else LONG}", "max_tokens": 60 + 20 * i, "ignore_eos": True}
    | ({"temperature": 0} if i < 4 else {"temperature": 1.0, "seed": i})
    for i, word in enumerate(WORDS)
]
SCHEMA = {
    "type": "object",
    "properties": {"word": {"enum": WORDS}},
    "required": ["word"],
    "additionalProperties": False,
}
CHAT = {"messages": [{"role": "user", "content": "Which word?"}], "temperature": 0, "max_tokens": 40}
FORMED = {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "word", "schema": SCHEMA}}}


AS_FREE, AS_LIMITED = ({"Authorization": f"Bearer sk-{name}"} for name in (FREE, LIMITED))


class Broken(Exception):
    """A request that did not get its answer, and that its client may send again."""


@dataclass(slots=True)
class Visits:
    """answered, left, refused: requests by way. broken: errors by what was struck last. texts: that came to each
    body; more than one is wrong, and `wrong` says so, as it does of every error that a client could not help with by
    asking again."""

    answered: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    broken: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    texts: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def take(self, way: str, name: str, text: str) -> None:
        if text != self.texts.setdefault(name, text):
            self.wrong.append(f"{way}: another text of {name}: {text!r}, before {self.texts[name]!r}")
        self.answered[way] += 1


class Visitors:
    """Enter it in an event loop: so many clients then ask until it is left, and end the requests under way."""

    def __init__(self, url: str, clients: int, visits: Visits, struck: Callable[[], str]):
        """struck: what was struck last."""
        self._url, self._clients, self.visits, self._struck = url, clients, visits, struck
        self._done = asyncio.Event()
        self._ways: list[Callable[[httpx.AsyncClient, random.Random], Awaitable[None]]] = [
            self._stream, self._leave_stream, self._whole, self._leave_whole, self._keyed, self._formed, self._response,
            self._talk, self._limited, self._agent, self._batch,
        ]  # fmt: skip

    async def __aenter__(self) -> Visitors:
        self._http = httpx.AsyncClient(
            base_url=self._url, timeout=LIMIT_S, limits=httpx.Limits(max_connections=None), headers=AS_FREE
        )
        self._tasks = [asyncio.create_task(self._visit(random.Random(i))) for i in range(self._clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._done.set()
        await asyncio.gather(*self._tasks)
        await self._http.aclose()

    async def read_all(self) -> None:
        """Get the text of each body once."""
        for name, body in {f"body {i}": body for i, body in enumerate(BODIES)}.items():
            for model in (MODEL, ADAPTER):
                answer = await _post(self._http, "/v1/completions", {**body, "model": model})
                self.visits.take("an answer as a whole", f"{name} of {model}", answer["choices"][0]["text"])

    async def _visit(self, rng: random.Random) -> None:
        while not self._done.is_set():
            way = rng.choice(self._ways)
            try:
                await asyncio.wait_for(way(self._http, rng), 2 * LIMIT_S)
            except (Broken, httpx.RemoteProtocolError, httpx.ReadError, httpx.ConnectError) as error:
                self.visits.broken[self._struck()].append(f"{way.__name__}: {error!r}")
                await asyncio.sleep(PAUSE_S)
            except Exception as error:  # noqa: BLE001  what a client could not help is what is looked for
                self.visits.wrong.append(f"{way.__name__} after {self._struck()}: {error!r}")

    async def _stream(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        name, body = _some(rng)
        lines, text = list[str](), ""
        async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            await _check(response)
            async for line in response.aiter_lines():
                text += _text_of(line)
                lines.append(line)
        if "data: [DONE]" not in lines:
            raise Broken("it just stopped")
        ends = sum('"finish_reason":"' in line for line in lines)
        assert (ends, lines.count("data: [DONE]")) == (1, 1), f"{name} ends {ends} times"
        self.visits.take("a stream", name, text)

    async def _leave_stream(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        _, body = _some(rng)
        events = rng.randrange(30)
        async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            await _check(response)
            async for line in response.aiter_lines():
                _text_of(line)
                events -= line.startswith("data: {")
                if events < 0:
                    break
        self.visits.left["a stream"] += 1

    async def _whole(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        name, body = _some(rng)
        answer = await _post(http, "/v1/completions", body)
        self.visits.take("an answer as a whole", name, answer["choices"][0]["text"])

    async def _leave_whole(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Sometimes in the midst of a handoff."""
        name, body = _some(rng)
        try:
            async with asyncio.timeout(rng.choice([0.05, 0.3, 2.0])):
                answer = await _post(http, "/v1/completions", body)
        except TimeoutError:
            self.visits.left["an answer as a whole"] += 1
        else:
            self.visits.take("an answer as a whole", name, answer["choices"][0]["text"])

    async def _keyed(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Goes on where its connection broke."""
        name, body = _some(rng)
        client = ResumingClient(f"soak-{rng.getrandbits(64):x}", body)
        async with asyncio.timeout(LIMIT_S):
            while not client.done:
                await client.read(http, self._url)
                await asyncio.sleep(0 if client.done else PAUSE_S)
        self.visits.take("with an Idempotency-Key", name, client.text)

    async def _formed(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        answer = await _post(http, "/v1/chat/completions", FORMED)
        self.visits.take("a form", "a form", answer["choices"][0]["message"]["content"])

    async def _response(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Stored, and gone on with."""
        body = {"input": "What is an ocean?", "temperature": 0, "max_output_tokens": 30}
        first = await _post(http, "/v1/responses", body)
        second = await _post(http, "/v1/responses", {**body, "previous_response_id": first["id"]})
        for name, answer in (("a response", first), ("a second response", second)):
            self.visits.take("a response", name, json.dumps([item["content"][0]["text"] for item in answer["output"]]))

    async def _talk(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Hold a conversation between two turns, and end the hold sometimes."""
        number = rng.randrange(len(WORDS))
        session = f"soak-{rng.getrandbits(64):x}"
        turns = [{"role": "user", "content": f"What is a {WORDS[number]} {LONG}?"}]
        for turn in range(2):
            body = {"messages": turns, "temperature": 0, "max_tokens": 30, "session_id": session, "hold_s": 20}
            answer = await _post(http, "/v1/chat/completions", body)
            text = answer["choices"][0]["message"]["content"]
            self.visits.take("a turn", f"turn {turn} about {WORDS[number]}", text)
            turns = [*turns, {"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
        if rng.random() < 0.5:
            response = await http.delete(f"/v1/holds/{session}")
            if response.status_code != 404:  # its replica may have died, and the hold with it
                await _check(response)

    async def _agent(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Goes on with what tools have found, after pauses in which its KV may go to a tier."""
        number, context = rng.randrange(len(WORDS)), f"You look up the word {WORDS[rng.randrange(2)]}.\n"
        for turn in range(TURNS):
            context += f"The tool says: {WORDS[(number + turn) % len(WORDS)]} {LONG if turn == 0 else ''}\n"
            body = {"model": MODEL, "prompt": context, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
            answer = await _post(http, "/v1/completions", body)
            text = answer["choices"][0]["text"]
            self.visits.take("a turn of an agent", f"turn {turn} after {context[:40]} {number}", text)
            context += text
            await asyncio.sleep(rng.uniform(0, PAUSE_S))

    async def _batch(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Has three lines answered, and deletes their files."""
        chosen = rng.sample(range(len(BODIES)), 3)
        lines = [
            {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": {**BODIES[i], "model": MODEL}}
            for i in chosen
        ]
        upload = {"file": ("lines.jsonl", "\n".join(map(json.dumps, lines)).encode())}
        response = await http.post("/v1/files", files=upload, data={"purpose": "batch"})
        await _check(response)
        file_id = response.json()["id"]
        batch = await _post(http, "/v1/batches", {"input_file_id": file_id, "endpoint": "/v1/completions",
                                                  "completion_window": "24h"})  # fmt: skip
        while batch["status"] not in ENDED:
            await asyncio.sleep(PAUSE_S)
            response = await http.get(f"/v1/batches/{batch['id']}")
            await _check(response)
            batch = response.json()
        assert batch["status"] == "completed" and batch["request_counts"]["failed"] == 0, batch
        response = await http.get(f"/v1/files/{batch['output_file_id']}/content")
        await _check(response)
        for line in map(json.loads, response.text.splitlines()):
            text = line["response"]["body"]["choices"][0]["text"]
            self.visits.take("a line of a batch", f"body {line['custom_id']} of {MODEL}", text)
        for each in (file_id, batch["output_file_id"]):
            await _check(await http.delete(f"/v1/files/{each}"))

    async def _limited(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        name, body = _some(rng)
        response = await http.post("/v1/completions", json=body, headers=AS_LIMITED)
        if response.status_code == 429:
            assert response.json()["error"]["code"] == "rate_limit_exceeded", response.text
            assert int(response.headers["retry-after"]) <= 60
            self.visits.refused["by a limit"] += 1
            return
        await _check(response)
        self.visits.take("with a limited key", name, response.json()["choices"][0]["text"])


def _some(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a body and its name. Every other time no cache has its prompt, and every third time it is for the
    adapter."""
    number, model = rng.randrange(len(BODIES)), rng.choice([MODEL, MODEL, ADAPTER])
    salt = {"cache_salt": f"{rng.getrandbits(64):x}"} if rng.random() < 0.5 else {}
    return f"body {number} of {model}", {**BODIES[number], "model": model, **salt}


async def _post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await http.post(path, json=body)
    await _check(response)
    answer: dict[str, Any] = response.json()
    return answer


async def _check(response: httpx.Response) -> None:
    if response.status_code != 200:
        text = (await response.aread()).decode()
        if response.status_code in NOBODY_THERE:
            raise Broken(text)
        raise AssertionError(f"{response.status_code}: {text}")


def _text_of(line: str) -> str:
    """Return what an event adds to a text. Raises Broken for an error that may be asked again."""
    if not line.startswith("data: {"):
        return ""
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        if event["error"]["type"] == "service_unavailable_error":
            raise Broken(line)
        raise AssertionError(line)
    text: str = event["choices"][0]["text"]
    return text
