"""Holds of official clients on three replicas behind two ingresses: the next turn comes to the replica that holds its
conversation. Holds of a replica that is stopped move to another. A replica that is killed breaks its holds; each is
counted once, and its next turn is told."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest

from tests.models import make_model
from tests.scrape import Scrape
from tests.serve.replicas.test_replay import explained
from tests.serve.serve_run import ServeRun, kill_all, wait_until

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(600)]

REPLICAS, INGRESSES = 3, 2
QUESTION = "The ocean is deep and blue. " * 20
HOUR = {"type": "ephemeral", "ttl": "1h"}
Answer = tuple[str, int, list[dict[str, Any]]]  # text, cached tokens, and what became of the hold


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ServeRun]:
    """Its replicas take turns, so only the hold brings a conversation back."""
    folder = tmp_path_factory.mktemp("serve")
    model = make_model(folder, "llama", tokenizer=True, max_position_embeddings=4096)
    engine = {"device": "cpu", "dtype": "float32", "num_threads": 1, "num_gpu_blocks_override": 3000, "max_num_seqs": 8}
    decode = {"num_replicas": REPLICAS, "num_cpus": 0.2, "routing": {"policy": "round_robin"}}
    args = {"models": [{"name": "tiny", "model": str(model), "engine": engine, "decode": decode}]}
    with ServeRun(folder, {**args, "ingress": {"num_replicas": INGRESSES}}) as server:
        server.wait_until_healthy(REPLICAS)
        yield server


@dataclass
class Turn:
    text: str
    cached: int
    holds: list[dict[str, Any]]
    engine: str
    routed: str  #: why the engine was chosen
    told_broken: bool


@dataclass
class Talk:
    """A conversation. ask: sends its messages under an id, and may ask for a hold."""

    server: ServeRun
    name: str
    ask: Callable[[list[dict[str, str]], str, bool], Answer]
    messages: list[dict[str, str]] = field(default_factory=list)
    asked: int = 0

    def turn(self, *, hold: bool = True) -> Turn:
        """Ask for the next answer, which is not added to the messages."""
        self.asked += 1
        name = f"{self.name}-{self.asked}"
        text, cached, holds = self.ask(self.messages, name, hold)
        timeline = explained(self.server, name)
        events = [event["what"] for event in timeline["events"]]
        (routed,) = (event for event in events if event.startswith("routed to "))
        reason = routed.partition(": ")[2].partition(",")[0]
        return Turn(text, cached, holds, timeline["engines"][-1], reason, any("is broken" in e for e in events))

    def is_brought_back(self) -> bool:
        return self.turn(hold=False).routed == "held"


def start(server: ServeRun, name: str) -> Talk:
    """A new conversation of one of the two clients."""
    import anthropic  # its import takes two seconds, in each process that collects

    openai_client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)
    anthropic_client = anthropic.Anthropic(base_url=server.url, api_key="none", timeout=120, max_retries=0)

    def by_openai(messages: list[dict[str, str]], request: str, hold: bool) -> Answer:
        answer: Any = openai_client.chat.completions.create(  # type: ignore[call-overload]
            model="tiny",
            messages=messages,
            max_tokens=8,
            temperature=0,
            extra_headers={"x-request-id": request},
            extra_body={"ignore_eos": True, **({"hold_s": 600} if hold else {})},
        )
        cached = answer.usage.prompt_tokens_details.cached_tokens
        return answer.choices[0].message.content, cached, answer.usage.model_extra.get("holds", [])

    def by_anthropic(messages: list[dict[str, str]], request: str, hold: bool) -> Answer:
        message: Any = anthropic_client.messages.create(  # type: ignore[call-overload]
            model="tiny",
            messages=messages,
            max_tokens=8,
            extra_headers={"x-request-id": request},
            extra_body={"temperature": 0, "ignore_eos": True, **({"cache_control": HOUR} if hold else {})},
        )
        usage = message.usage
        return message.content[0].text, usage.cache_read_input_tokens, usage.model_dump().get("holds", [])

    talk = Talk(server, name, by_anthropic if name.startswith("anthropic") else by_openai)
    talk.messages.append({"role": "user", "content": f"{name}: {QUESTION}"})
    return talk


def scrape(server: ServeRun) -> Scrape:
    return Scrape(httpx.get(f"{server.url}/metrics", timeout=60).text)


def held_by(server: ServeRun, engine: str) -> float:
    return scrape(server).sum("manta_holds", engine=engine)


def both_ingresses_route(server: ServeRun) -> bool:
    """Ask on a new connection. An ingress hears of holds from its first request on."""
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 1}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status()
    routed = scrape(server).select("manta_routed_requests_total", [("pool", "=", "decode")])
    return len({one.labels["ingress"] for one in routed if one.value}) == INGRESSES


def hold_conversations(server: ServeRun, names: list[str]) -> tuple[list[Talk], list[Turn]]:
    """Have the first turn of each conversation, and wait until the next one is brought back."""
    talks, firsts = [start(server, name) for name in names], []
    for talk in talks:
        first = talk.turn()
        (hold,) = first.holds
        assert hold["status"] == "held" and hold["tokens"] > 100
        talk.messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
        firsts.append(first)
        wait_until(talk.is_brought_back, timeout_s=120)
    return talks, firsts


def names(number: int) -> list[str]:
    return [f"{client}-{number}-{i}" for i in range(3) for client in ("openai", "anthropic")]


def test_the_next_turn_comes_to_the_replica_that_holds_its_conversation(server):
    wait_until(lambda: both_ingresses_route(server), timeout_s=120)
    talks, firsts = hold_conversations(server, names(1))
    assert len({first.engine for first in firsts}) > 1
    for talk, first in zip(talks, firsts, strict=True):
        (hold,) = first.holds
        turn = talk.turn(hold=False)
        assert (turn.engine, turn.routed) == (first.engine, "held")
        assert turn.cached >= hold["tokens"]


@pytest.mark.parametrize(("number", "how"), [(2, "SIGTERM"), (3, "scale-down")])
def test_holds_of_a_replica_that_is_stopped_move_to_others(server, number, how):
    """They move to another replica, which is not asked for by its name, and keep their names and remaining time."""
    wait_until(lambda: both_ingresses_route(server) and scrape(server).sum("manta_up") == REPLICAS, timeout_s=120)
    before = scrape(server).sum("manta_holds_broken_total")
    talks, firsts = hold_conversations(server, names(number))
    expected = [talk.turn(hold=False).text for talk in talks]
    engines = {first.engine for first in firsts}
    held = sum(held_by(server, engine) for engine in engines)
    if how == "SIGTERM":
        server.process_of(firsts[0].engine).terminate()
        gone = {firsts[0].engine}
    else:
        server.scale("decode-tiny", REPLICAS - 1)
        wait_until(lambda: scrape(server).sum("manta_up") == REPLICAS - 1, timeout_s=120)
        up = {one.labels["engine"] for one in scrape(server).select("manta_holds", [])}
        gone = engines - up
    moved = server.wait_for_line("holds have moved", timeout_s=120)
    assert re.search(r"granted=(\d+) of=\1 ", moved), moved
    for talk, first, text in zip(talks, firsts, expected, strict=True):
        wait_until(lambda talk=talk: talk.is_brought_back(), timeout_s=120)
        turn = talk.turn(hold=False)
        assert (turn.text, turn.told_broken, turn.routed) == (text, False, "held")
        assert turn.cached >= first.holds[0]["tokens"]
        assert turn.engine not in gone
    assert scrape(server).sum("manta_holds_broken_total") == before
    print(f"\n{how}: {moved.strip()}; {held:g} held before")
    server.scale("decode-tiny", REPLICAS)


def test_a_replica_that_is_killed_breaks_its_holds_which_are_counted_once_and_told_to_their_next_turns(server):
    wait_until(lambda: both_ingresses_route(server) and scrape(server).sum("manta_up") == REPLICAS, timeout_s=120)
    before = scrape(server).sum("manta_holds_broken_total")
    talks, firsts = hold_conversations(server, names(4))
    home = firsts[0].engine
    lost = held_by(server, home)
    assert lost >= sum(first.engine == home for first in firsts)
    expected = [talk.turn(hold=False).text for talk in talks]
    victim = server.process_of(home)
    kill_all([*victim.children(recursive=True), victim])
    assert httpx.delete(f"{server.url}/v1/holds/of-nobody", timeout=30).status_code == 200, "the dead holds nothing"
    wait_until(lambda: scrape(server).sum("manta_holds_broken_total") == before + lost, timeout_s=120)
    for talk, first, text in zip(talks, firsts, expected, strict=True):
        turn = talk.turn(hold=False)
        assert turn.text == text
        assert turn.told_broken == (first.engine == home)
        assert turn.engine != home
    assert scrape(server).sum("manta_holds_broken_total") == before + lost, "one count for both ingresses"
