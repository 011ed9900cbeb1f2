"""Sessions over HTTP and a fake engine: what their turns have used, and budgets that end them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from deployments.billing.prices import Prices
from deployments.frontend.api_keys import key_line
from deployments.http.middleware import AuthConfig
from deployments.openai.batches.config import BatchConfig
from deployments.parts.sessions import books, live_turn
from deployments.storage.config import StoreConfig
from deployments.storage.memory import MemoryStore
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.costs import SequenceCost
from engine.wire.parts.holds import ReleaseHolds
from tests.deployments.fake_api import FakeApi, fake_api, says, until
from tests.deployments.jobs.test_jobs import change_record, events_of
from tests.deployments.openai.batches.batches import client_of, ended, jsonl, line, start

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
ROUTES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "abcd", "max_tokens": 20},
    "chat/completions": CHAT,
    "messages": {**CHAT, "model": "fake"},
    "responses": {"input": "hello", "max_output_tokens": 20},
    "embeddings": {"input": ["hello", "world"]},
    "score": {"queries": "hello", "documents": ["world", "sea"]},
}
COST = SequenceCost(compute_s=2.0, wasted_s=0.5, kv_gib_s=3.0)
PRICES = Prices(engine_hour=3600.0)  # a second costs 1
KEYS = AuthConfig(api_keys=tuple(key_line(name, f"sk-{name}") for name in ("ann", "bob")))
PROMPT = [20, 21, 22, 23]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_turn, "SYNC_TIMEOUT_S", 30.0)


def chain(request: GenerateRequest) -> list[int]:
    """An answer of which each token follows from the one before, so that it can be gone on with."""
    tokens = [request.prompt[-1]]
    for _ in range(300):
        tokens.append(10 + (7 * tokens[-1] + 3) % 300)
    return tokens[1:]


async def ask(api: FakeApi, route: str = "completions", session: str = "s", **more: Any) -> httpx.Response:
    """more: fields of the body; those with a dash are headers."""
    headers = {"x-session-id": session, **{name: str(more.pop(name)) for name in list(more) if "-" in name}}
    body = {**ROUTES[route], **more} if route != "completions" else {"prompt": PROMPT, "max_tokens": 20, **more}
    return await api.client.post(f"/v1/{route}", json=body, headers=headers)


async def look(api: FakeApi, session: str = "s", **headers: str) -> Any:
    answer = await api.client.get(f"/v1/sessions/{session}", headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens_of(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


@asynccontextmanager
async def two(folder: Path, **options: Any) -> AsyncGenerator[tuple[FakeApi, FakeApi]]:
    """Two ingresses with one store."""
    store = StoreConfig(url=f"sqlite://{folder}/store.db")
    async with fake_api(chain, store=store, **options) as one, fake_api(chain, store=store, **options) as other:
        yield one, other


async def test_turns_on_all_routes_are_told_apart_and_add_up_as_their_answers_say():
    async with fake_api(says("hello world"), prices=PRICES) as api:
        api.engine.cost, api.engine.cached_tokens = COST, 2
        total = 0
        for route in ROUTES:
            answer = await ask(api, route)
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            parts = ("input_tokens", "cache_read_input_tokens", "output_tokens")  # as Anthropic tells them apart
            total += usage.get("total_tokens", sum(usage.get(part, 0) for part in parts))
        told = await look(api)
        usage, turns = told["usage"], told["turns"]
        assert usage == told["own_usage"] and usage["turns"] == len(turns) == len(ROUTES)
        assert usage["prompt_tokens"] + usage["output_tokens"] == total
        for name in ("prompt_tokens", "cached_tokens", "output_tokens", "compute_seconds", "cost"):
            assert usage[name] == pytest.approx(sum(turn[name] for turn in turns)), name
        chat = turns[1]
        assert chat["id"].startswith("chatcmpl-") and chat["engines"] == ["fake"] and chat["finish_reason"] == "length"
        assert (chat["cached_tokens"], chat["compute_seconds"], chat["cost"]) == (2, 2.0, 2.0)
        assert 0 <= chat["wait_s"] <= chat["first_token_s"] <= chat["seconds"]


async def test_what_clients_name_on_their_own_is_a_session_too_and_a_request_without_one_is_none():
    async with fake_api(says("hello")) as api:
        for headers in ({}, {"x-claude-code-session-id": "claude"}):
            assert (await api.client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200
        assert (await api.post("chat/completions", **CHAT, session_id="body")).status_code == 200
        listed = (await api.client.get("/v1/sessions")).json()
        assert {each["id"] for each in listed["data"]} == {"claude", "body"} and not listed["has_more"]


async def test_what_sessions_below_have_used_counts_for_those_above_and_is_told_apart(tmp_path):
    async with two(tmp_path) as (one, other):
        await ask(one, session="top")
        await ask(other, session="sub", **{"x-parent-session-id": "top"})
        await ask(one, session="subsub", **{"x-parent-session-id": "sub"})
        await ask(other, session="sub")
        for api in (one, other):
            top, sub, leaf = [await look(api, name) for name in ("top", "sub", "subsub")]
            assert [each["usage"]["turns"] for each in (top, sub, leaf)] == [4, 3, 1]
            assert [each["own_usage"]["turns"] for each in (top, sub, leaf)] == [1, 2, 1]
            assert (top["children"], sub["parent"], leaf["parent"]) == (["sub"], "top", "sub")
            assert [turn["session"] for turn in top["turns"]] == ["top", "sub", "subsub", "sub"]
            listed = (await api.client.get("/v1/sessions")).json()["data"]
            assert [each["id"] for each in listed] == ["top"]


async def test_only_the_key_of_a_session_sees_counts_for_and_ends_it():
    async with fake_api(says("hello"), auth=KEYS) as api:
        ann, bob = ({"authorization": f"Bearer sk-{name}"} for name in ("ann", "bob"))
        for headers in (ann, bob, bob):
            sent = {"x-session-id": "s", **headers}
            await api.client.post("/v1/chat/completions", json=CHAT, headers=sent)
        assert (await look(api, **ann))["usage"]["turns"] == 1 and (await look(api, **bob))["usage"]["turns"] == 2
        assert (await api.client.delete("/v1/sessions/s", headers=bob)).status_code == 200
        for method in ("GET", "DELETE"):
            gone = await api.client.request(method, "/v1/sessions/s", headers=bob)
            assert (gone.status_code, gone.json()["error"]["code"]) == (404, "session_not_found")
        assert (await look(api, **ann))["usage"]["turns"] == 1
        assert (await api.client.get("/v1/sessions", headers=bob)).json()["data"] == []


async def test_a_budget_ends_an_answer_at_its_last_token_and_a_higher_one_goes_on_with_the_same_text():
    async with fake_api(chain) as api:
        whole = tokens_of(await ask(api, session="", max_tokens=250, return_token_ids=True))
        answer = await ask(api, max_tokens=250, return_token_ids=True, **{"x-session-max-tokens": 150})
        begun = tokens_of(answer)
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert len(PROMPT) + len(begun) == 150
        told = await look(api)
        assert told["turns"][0]["finish_reason"] == "budget" and told["remaining_tokens"] == 0
        await until(lambda: not api.engine.num_live)
        refused, num_added = await ask(api), len(api.engine.added)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (
            402, "session_budget_spent", "x-session-max-tokens",
        )  # fmt: skip
        assert len(api.engine.added) == num_added and (await look(api))["usage"]["turns"] == 1
        rest = await ask(
            api, prompt=[*PROMPT, *begun], max_tokens=250 - len(begun), return_token_ids=True,
            **{"x-session-max-tokens": 5000},
        )  # fmt: skip
        assert begun + tokens_of(rest) == whole


@pytest.mark.parametrize("stream", [False, True])
async def test_all_apis_tell_of_a_budget_as_of_max_tokens_and_the_engine_stops(stream):
    async with fake_api(chain) as api:
        for route, told in (
            ("completions", '"finish_reason":"length"'),
            ("chat/completions", '"finish_reason":"length"'),
            ("messages", '"stop_reason":"max_tokens"'),
            ("responses", '"reason":"max_output_tokens"'),
        ):
            fields = {"max_output_tokens" if route == "responses" else "max_tokens": 250}
            begun = await ask(api, route, session=route, **fields, stream=stream, **{"x-session-max-tokens": 90})
            assert told in begun.text.replace(": ", ":"), begun.text
            await until(lambda: not api.engine.num_live)
            usage = (await look(api, route))["usage"]
            assert usage["prompt_tokens"] + usage["output_tokens"] == 90
            assert (await ask(api, route, session=route, **fields, stream=stream)).status_code == 402


async def test_a_response_that_a_budget_has_ended_can_be_gone_on_with():
    async with fake_api(chain) as api:
        begun = await ask(api, "responses", max_output_tokens=250, **{"x-session-max-tokens": 90})
        assert begun.json()["status"] == "incomplete"
        more = {"previous_response_id": begun.json()["id"], "x-session-max-tokens": 5000}
        assert (await ask(api, "responses", **more)).status_code == 200


@pytest.mark.parametrize("n", [1, 3])
async def test_all_turns_of_a_tree_in_all_ingresses_never_exceed_its_budget_and_use_it_up(tmp_path, n):
    budget, num_turns = 900, 6
    async with two(tmp_path) as (one, other):
        await ask(one, session="top", **{"x-session-max-tokens": budget})
        answers = await asyncio.gather(
            *(
                ask(api, session=f"{i}{api is one}", max_tokens=280, n=n, **{"x-parent-session-id": "top"})
                for i in range(num_turns // 2)
                for api in (one, other)
            )
        )
        assert {answer.status_code for answer in answers} == {200}
        told = await look(other, "top")
        used = told["usage"]["prompt_tokens"] + told["usage"]["output_tokens"]
        assert used == budget
        assert told["usage"]["turns"] == 1 + num_turns
        assert "budget" in {turn["finish_reason"] for turn in told["turns"]}
        refused = await ask(one, session="another", **{"x-parent-session-id": "0True"})
        assert refused.status_code == 402 and "'top'" in refused.json()["error"]["message"]


async def test_a_budget_in_money_ends_an_answer_a_step_after_it_is_used_up():
    spent = 0.0

    def grows(request: GenerateRequest) -> list[int]:
        nonlocal spent
        spent += 0.1
        api.engine.cost = SequenceCost(compute_s=spent, wasted_s=0.0, kv_gib_s=0.0)
        return chain(request)

    async with fake_api(grows, prices=PRICES) as api:
        answer = await ask(api, max_tokens=250, **{"x-session-max-budget": "2.5"})
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "length"
        await until(lambda: not api.engine.num_live)
        told = await look(api)
        assert told["max_budget"] == 2.5 <= told["usage"]["cost"] < 2.5 + 1.0, "some steps until the engine hears of it"
        assert told["remaining_budget"] == 0 and told["turns"][0]["finish_reason"] == "budget"
        assert (await ask(api)).json()["error"]["param"] == "x-session-max-budget"


BAD: dict[str, tuple[dict[str, str], str]] = {
    "no number": ({"x-session-max-tokens": "many"}, "x-session-max-tokens"),
    "no whole number": ({"x-session-max-tokens": "1.5"}, "x-session-max-tokens"),
    "nothing": ({"x-session-max-tokens": "0"}, "x-session-max-tokens"),
    "negative": ({"x-session-max-budget": "-1"}, "x-session-max-budget"),
    "no prices": ({"x-session-max-budget": "1.50"}, "x-session-max-budget"),
    "no session": ({"x-session-max-tokens": "5", "x-session-id": ""}, "x-session-max-tokens"),
    "no child": ({"x-parent-session-id": "p", "x-session-id": ""}, "x-parent-session-id"),
    "its own parent": ({"x-parent-session-id": "s"}, "x-parent-session-id"),
    "a second parent": ({"x-parent-session-id": "q", "x-session-id": "known"}, "x-parent-session-id"),
    "too late a parent": ({"x-parent-session-id": "known", "x-session-id": "p"}, "x-parent-session-id"),
    "too long": ({"x-parent-session-id": "p" * 257}, "x-parent-session-id"),
}


@pytest.mark.parametrize("bad", BAD)
async def test_a_header_that_cannot_be_obeyed_is_refused_by_name(bad):
    headers, field = BAD[bad]
    async with fake_api(says("hello")) as api:
        await ask(api, session="known", **{"x-parent-session-id": "p"})
        sent = {"x-session-id": "s", **headers}
        answer = await api.client.post("/v1/chat/completions", json=CHAT, headers=sent)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
        assert len(api.engine.added) == 1


async def test_an_answer_that_is_sent_again_is_one_turn(tmp_path):
    async with two(tmp_path) as (one, other):
        for api in (one, one, other):
            answer = await ask(api, **{"idempotency-key": "once"})
            assert answer.status_code == 200
            await until(lambda: not one.engine.num_live)
        await until_turns(other, 1)
        assert len(one.engine.added) + len(other.engine.added) == 1


@pytest.mark.parametrize("by_its_id", [False, True])
async def test_an_answer_that_another_ingress_computes_again_is_in_place_of_the_first_one(tmp_path, by_its_id):
    async with two(tmp_path) as (one, other):
        headers = {"idempotency-key": "once", "session-id": "codex"}  # as a client names its own sessions
        body = {"prompt": PROMPT, "max_tokens": 20, "stream": True}
        events = events_of((await one.client.post("/v1/completions", json=body, headers=headers)).text)
        await until_turns(one, 1, "codex")
        stream_id, last = events[0][0][:32], {"last-event-id": events[6][0]}
        store = StoreConfig(url=f"sqlite://{tmp_path}/store.db")
        await change_record(store, stream_id, outputs=None)  # as if it had died before the end
        if by_its_id:
            rest = await other.client.get(f"/v1/streams/{stream_id}", headers=last)
        else:
            rest = await other.client.post("/v1/completions", json=body, headers=headers | last)
        assert events_of(rest.text) == events[7:] and len(other.engine.added) == 1
        told = await until_turns(other, 1, "codex")
        assert (told["usage"]["prompt_tokens"], told["usage"]["output_tokens"]) == (len(PROMPT), 20)


async def until_turns(api: FakeApi, count: int, session: str = "s") -> Any:
    """The session, once so many of its turns have ended."""
    async with asyncio.timeout(60):
        while True:
            told = await look(api, session)
            if sum(turn["finish_reason"] is not None for turn in told["turns"]) >= count:
                assert told["usage"]["turns"] == len(told["turns"]) == count
                return told
            await asyncio.sleep(0.005)


async def test_prompts_that_are_computed_in_parts_are_one_turn_and_keep_to_the_budget_together():
    async with fake_api() as api:
        one = (await ask(api, "embeddings", session="", input=["hello"])).json()["usage"]["prompt_tokens"]
        answer = await ask(api, "embeddings", session="one", input=["hello"], **{"x-session-max-tokens": one})
        assert answer.status_code == 200 and (await look(api, "one"))["remaining_tokens"] == 0
        texts = {"input": ["hello"] * 100}
        whole = (await ask(api, "embeddings", **texts)).json()["usage"]["prompt_tokens"]
        told = await until_turns(api, 1)
        assert told["usage"]["prompt_tokens"] == whole
        for budget, status in ((whole, 200), (whole - 1, 402)):
            headers = {"x-session-max-tokens": budget}
            answer = await ask(api, "embeddings", session=str(budget), **texts, **headers)
            assert answer.status_code == status
            used = (await until_turns(api, 1, str(budget)))["usage"]["prompt_tokens"]
            assert used <= budget and (status == 402 or used == whole)


async def test_a_response_that_continues_another_is_a_turn_of_its_session_unless_it_names_one():
    async with fake_api(says("hello")) as api:
        first = (await ask(api, "responses")).json()["id"]
        second = (await api.post("responses", input="on", previous_response_id=first)).json()["id"]
        await api.post("responses", input="on", previous_response_id=second)
        await ask(api, "responses", session="other", previous_response_id=second)
        assert (await look(api))["usage"]["turns"] == 3 and (await look(api, "other"))["usage"]["turns"] == 1
        assert [request.session_id for request in api.engine.added] == ["s", "s", "s", "other"]


async def test_a_response_in_the_background_and_the_line_of_a_batch_are_turns_of_their_session(tmp_path):
    async with fake_api(says("hello"), batches=BatchConfig(folder=str(tmp_path))) as api:
        answer = await ask(api, "responses", background=True)
        assert answer.json()["status"] == "queued"
        await until(lambda: api.engine.added)
        await until_turns(api, 1)
        client = client_of(api)
        lines = jsonl(*(line(name, prompt="abcd", max_tokens=5, session_id="s") for name in "ab"))
        assert (await ended(client, (await start(client, lines)).id)).status == "completed"
        told = await until_turns(api, 3)
        assert told["usage"]["output_tokens"] == sum(turn["output_tokens"] for turn in told["turns"]) > 10


async def test_a_request_that_is_refused_or_fails_before_it_runs_is_no_turn():
    async with fake_api(says("hello"), max_num_seqs=1, max_waiting=1) as api:
        api.engine.paused.set()
        asked = [asyncio.create_task(ask(api, max_tokens=1)) for _ in range(6)]
        await until(lambda: any(each.done() for each in asked))  # some run or wait, the others are refused
        assert {turn["finish_reason"] for turn in (await look(api))["turns"]} == {None}
        api.engine.paused.clear()
        statuses = [(await each).status_code for each in asked]
        assert {*statuses} == {200, 429}
        await until_turns(api, statuses.count(200))


async def test_a_client_that_leaves_pays_for_the_turn_as_far_as_it_was_computed():
    async with fake_api(chain) as api:
        api.engine.cost = COST
        api.engine.paused.set()
        running = asyncio.create_task(ask(api))
        await until(lambda: api.engine.num_live)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        api.engine.paused.clear()
        await until(lambda: api.engine.aborted)
        told = await until_turns(api, 1)
        assert told["turns"][0]["finish_reason"] == "abort" and told["usage"]["prompt_tokens"] == len(PROMPT)


async def test_a_deleted_session_ends_with_those_below_and_their_holds_and_its_running_turns_are_not_counted():
    async with fake_api(chain) as api:
        await ask(api, session="top")
        api.engine.paused.set()
        running = asyncio.create_task(ask(api, session="sub", **{"x-parent-session-id": "top"}))
        await until(lambda: api.engine.num_live)
        assert (await api.client.delete("/v1/sessions/top")).json() == {
            "id": "top", "object": "session", "deleted": True,
        }  # fmt: skip
        await until(lambda: len(api.engine.released) == 2)
        assert {msgspec.structs.replace(each) for each in api.engine.released} == {
            ReleaseHolds("top", None), ReleaseHolds("sub", None),
        }  # fmt: skip
        api.engine.paused.clear()
        assert (await running).status_code == 200
        for name in ("top", "sub"):
            assert (await api.client.get(f"/v1/sessions/{name}")).status_code == 404
        await ask(api, session="sub")
        assert (await look(api, "sub"))["parent"] is None


async def test_a_deleted_session_below_another_stays_in_the_others_sums():
    async with fake_api(chain) as api:
        await ask(api, session="top", **{"x-session-max-tokens": 1000})
        await ask(api, session="sub", **{"x-parent-session-id": "top"})
        before = await look(api, "top")
        assert (await api.client.delete("/v1/sessions/sub")).status_code == 200
        after = await look(api, "top")
        assert (after["usage"], after["remaining_tokens"]) == (before["usage"], before["remaining_tokens"])
        assert not after["children"] and len(after["turns"]) == 1


async def test_sessions_are_listed_by_page_and_the_one_unused_for_longest_ends_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(books, "MAX_SESSIONS", 3)
    async with fake_api(says("hello")) as api:
        for name in "abcde":
            await ask(api, session=name)
        first = (await api.client.get("/v1/sessions?limit=2")).json()
        assert [each["id"] for each in first["data"]] == ["e", "d"] and first["has_more"]
        rest = (await api.client.get("/v1/sessions?limit=2&after=d")).json()
        assert [each["id"] for each in rest["data"]] == ["c"] and not rest["has_more"]
        assert (await api.client.get("/v1/sessions?after=a")).json()["error"]["param"] == "after"
        assert (await api.client.get("/v1/sessions/a")).status_code == 404


async def test_a_session_ends_a_time_after_its_last_request(monkeypatch):
    monkeypatch.setattr(books, "TTL_S", 0.3)
    async with fake_api(says("hello")) as api:
        await ask(api)
        async with asyncio.timeout(60):
            while (await api.client.get("/v1/sessions/s")).status_code != 404:
                await asyncio.sleep(0.01)


async def test_without_the_store_a_budget_refuses_and_other_turns_are_counted_later(monkeypatch):
    real, away = MemoryStore.get, True

    async def get(self: MemoryStore, key: str) -> bytes | None:
        if away:
            raise self.unavailable("it is away")
        return await real(self, key)

    monkeypatch.setattr(MemoryStore, "get", get)
    monkeypatch.setattr(live_turn, "WRITE_AGAIN_S", 0.01)
    async with fake_api(chain) as api:
        refused = await ask(api, **{"x-session-max-tokens": 50})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
        waiting = asyncio.create_task(ask(api))
        await until(lambda: api.engine.added and not api.engine.num_live)
        away = False
        assert (await waiting).status_code == 200
        told = await until_turns(api, 1)
        assert told["usage"]["output_tokens"] == 20
