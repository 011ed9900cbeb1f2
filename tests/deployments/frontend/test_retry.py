"""Sequences whose engines are lost: what the client gets is what it would have got anyway."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from deployments.frontend import retry as retry_module
from deployments.frontend import sequence
from deployments.frontend.retry import RetryState, TokensLost
from deployments.frontend.token_channel import TokenChannel
from engine.core.request import Request
from engine.errors import (
    EngineError,
    EngineUnavailable,
    InvalidParameter,
    Moved,
    Overloaded,
    RequestTimeout,
    ServingError,
)
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.token_delta import TokenBatch, TokenDelta
from tests.deployments.fake_api import MAX_MODEL_LEN, until
from tests.deployments.replicas.mortal_pool import Death, MortalPool, Outcome, answer, ingress, listen
from tests.examples import examples
from tests.scrape import Scrape

PROMPT = [5, 6, 7]
DIES, REPORTS, LOSES = Death(), Death(reported=True), Death(error=None)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(retry_module, "BACK_OFF_S", 0.0)
    monkeypatch.setattr(sequence, "FINAL_DELTA_S", 0.0)


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, 60))


def request(
    name: str = "a", prompt: list[int] = PROMPT, timeout_s: float | None = 60.0, **params: Any
) -> GenerateRequest:
    params = {"max_tokens": 24, "min_tokens": 12, "logprobs": 0, **params}
    return GenerateRequest(request_id=name, prompt=prompt, params=SamplingParams(**params), timeout_s=timeout_s)


async def outcome(
    requests: list[GenerateRequest], deaths: dict[str, list[Death]] | None = None, *, n: int = 1, max_replays: int = 3
) -> tuple[Outcome, MortalPool]:
    """Checks on the way that all tokens of engines thought dead were dropped, and that every death was counted."""
    async with ingress() as one:
        pool = MortalPool(one.channel.address, deaths or {})
        try:
            run = one.generation(requests, pool, n=n, max_replays=max_replays)
            found = await listen(run, requests, pool.heard)
            await until(lambda: one.ingress_stats.dropped_deltas == pool.late)
        finally:
            pool.close()
        assert sum(one.stats.replays.values()) == len(pool.requests) - len(requests)
        return found, pool


def at(death: Death, after: int) -> Death:
    return dataclasses.replace(death, after=after)


@pytest.mark.parametrize("death", [DIES, REPORTS, LOSES], ids=["call fails", "engine says so", "tokens are lost"])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": -3}, {}], ids=["greedy", "seeded", "seed from the id"])
async def test_text_is_that_of_an_unbroken_run_wherever_the_engine_dies(death, params):
    asked = [request(prompt_logprobs=1, **params)]
    expected, _ = await outcome(asked)
    tokens = len(expected.heard[0].token_ids)
    assert tokens > 8
    for after in range(tokens):
        found, pool = await outcome(asked, {"a": [at(death, after)]})
        assert found == expected, after
        assert len(pool.requests) == 2


async def test_tokens_lost_on_the_way_are_noticed_by_the_next_one():
    """The engine knows nothing of it, and goes on."""
    expected, _ = await outcome([request()])
    for after in range(len(expected.heard[0].token_ids) - 1):
        found, pool = await outcome([request()], {"a": [Death(after, error=None, skipped=True)]})
        assert found == expected, after
        assert [r.request_id for r in pool.requests] == ["a", "a.1"]


async def test_text_is_that_of_an_unbroken_run_when_the_next_engine_dies_too():
    expected, _ = await outcome([request()])
    tokens = len(expected.heard[0].token_ids)
    for first, second in ((0, 0), (0, 5), (3, 3), (4, 9), (tokens - 1, tokens - 1)):
        found, pool = await outcome([request()], {"a": [at(DIES, first), at(DIES, second)]})
        assert found == expected
        assert [r.request_id for r in pool.requests] == ["a", "a.1", "a.2"]


async def test_stop_string_is_found_when_the_engine_dies_within_it():
    (whole,) = (await outcome([request(min_tokens=24)]))[0].heard
    middle = len(whole.text) // 2
    asked = [request(min_tokens=0, max_tokens=24, stop=[whole.text[middle : middle + 4]])]
    expected, _ = await outcome(asked)
    (heard,) = expected.heard
    assert heard.finish_reason == "stop"
    assert heard.stop_reason is not None
    for after in range(len(heard.token_ids)):
        found, _ = await outcome(asked, {"a": [at(DIES, after)]})
        assert found == expected, after


async def test_of_two_sequences_only_the_one_whose_engine_dies_is_asked_for_again():
    asked = [request("a", seed=1), request("b", seed=2)]
    expected, _ = await outcome(asked, n=2)
    assert expected.heard[0].text != expected.heard[1].text
    for name in "ab":
        found, pool = await outcome(asked, {name: [at(DIES, 4)]}, n=2)
        assert found == expected
        assert sorted(r.request_id for r in pool.requests) == sorted(["a", "b", f"{name}.1"])


@st.composite
def broken_runs(draw: st.DrawFn) -> tuple[list[GenerateRequest], dict[str, list[Death]]]:
    deaths, requests = {}, []
    for name in "abc"[: draw(st.integers(1, 3))]:
        max_tokens = draw(st.integers(1, 40))
        params = {
            "max_tokens": max_tokens,
            "min_tokens": draw(st.integers(0, max_tokens)),
            "seed": draw(st.none() | st.integers(-(2**63), 2**63 - 1)),
            "logprobs": draw(st.none() | st.just(0)),
            "prompt_logprobs": draw(st.none() | st.just(1)),
            "stop": draw(st.lists(st.sampled_from(["Th", "quick", "é", "👩", "\n", " h"]), max_size=2)),
            "include_stop_str_in_output": draw(st.booleans()),
        }
        requests.append(request(name, prompt=draw(st.lists(st.integers(3, 99), min_size=1, max_size=5)), **params))
        points = sorted(draw(st.lists(st.integers(0, 40), max_size=3)))
        deaths[name] = [at(draw(st.sampled_from([DIES, REPORTS, LOSES])), point) for point in points]
    return requests, deaths


@settings(max_examples=examples(100))
@given(broken_runs())
def test_no_client_can_tell_whether_engines_died(case):
    async def scenario() -> None:
        requests, deaths = case
        expected, _ = await outcome(requests)
        found, _ = await outcome(requests, deaths)
        assert found == expected

    run(scenario())


@pytest.mark.parametrize(
    "error",
    [
        InvalidParameter("top_p", 2.0, "at most 1"),
        RequestTimeout("a", 60.0),
        EngineError("a", "the logits are not finite"),
        Overloaded("the queue is full"),
    ],
)
@pytest.mark.parametrize("reported", [False, True])
async def test_error_that_another_engine_would_give_as_well_is_the_answer(error, reported):
    async with ingress() as one:
        pool = MortalPool(one.channel.address, {"a": [Death(2, error, reported)]})
        with pytest.raises(ServingError, match=str(error)):
            await listen(one.generation([request()], pool), [request()], pool.heard)
        assert len(pool.requests) == 1
        pool.close()


@pytest.mark.parametrize(("max_replays", "attempts"), [(0, 1), (3, 4)])
async def test_request_that_loses_one_engine_after_the_other_fails_in_the_end(max_replays, attempts):
    async with ingress() as one:
        pool = MortalPool(one.channel.address, {"a": [at(DIES, 2)] * 9})
        with pytest.raises(EngineUnavailable, match="send it again"):
            await listen(one.generation([request()], pool, max_replays=max_replays), [request()], pool.heard)
        assert len(pool.requests) == attempts
        assert one.stats.replays["engine_unavailable"] == max_replays
        assert one.stats.finished["error"] == 1
        pool.close()


async def test_full_queue_does_not_end_a_request_that_had_begun():
    expected, _ = await outcome([request()])
    found, pool = await outcome([request()], {"a": [at(DIES, 5), Death(5, Overloaded("the queue is full"))]})
    assert found == expected
    assert len(pool.requests) == 3


async def test_deadline_that_passes_before_another_engine_is_tried_ends_the_request(monkeypatch):
    monkeypatch.setattr(retry_module, "BACK_OFF_S", 60.0)
    monkeypatch.setattr(retry_module, "MAX_BACK_OFF_S", 60.0)
    for timeout_s in (0.3, 3.0, 30.0):  # on a busy machine it may pass before the first engine is tried
        async with ingress() as one:
            asked = [request(timeout_s=timeout_s)]
            pool = MortalPool(one.channel.address, {"a": [at(DIES, 1)]})
            with pytest.raises(RequestTimeout, match=rf"request a was not finished .* deadline of {timeout_s} s"):
                await listen(one.generation(asked, pool), asked, pool.heard)
            pool.close()
        if pool.requests:
            break
    assert len(pool.requests) == 1


async def test_client_that_leaves_before_another_engine_is_tried_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(retry_module, "BACK_OFF_S", 60.0)
    monkeypatch.setattr(retry_module, "MAX_BACK_OFF_S", 60.0)
    async with ingress() as one:
        pool = MortalPool(one.channel.address, {"a": [at(DIES, 1)]})
        before = asyncio.all_tasks()
        client = asyncio.create_task(listen(one.generation([request()], pool), [request()], pool.heard))
        await until(lambda: one.stats.replays["engine_unavailable"])
        client.cancel()
        with suppress(asyncio.CancelledError):
            await client
        await until(lambda: {t for t in asyncio.all_tasks() - before if "watch" not in repr(t)} == set())
        assert len(pool.requests) == 1
        assert one.stats.finished == {"stop": 0, "length": 0, "abort": 1, "error": 0}
        one.channel.open(["a", "a.1"])  # fails if one of them is still open
        pool.close()


async def test_replays_are_counted_in_the_metrics_and_logged_with_the_first_request_id(caplog, api):
    api.engine.paused.set()
    asking = asyncio.create_task(api.post("completions", prompt="a"))
    await until(lambda: api.engine.num_live == 1)
    api.replica.fail("rank 0 died")
    assert (await asking).status_code == 503
    scrape = Scrape((await api.client.get("/metrics")).text)
    assert scrape.sum("manta_request_replays_total", reason="engine_unavailable") == 3
    assert scrape.sum("manta_request_replays_total", reason="tokens_lost") == 0
    replayed = [r for r in caplog.records if r.message.startswith("request replayed")]
    assert [r.args[0] for r in replayed] == [api.engine.added[0].request_id] * 3


class PromptPool(MortalPool):
    """Engines that say all at once: that of `b` when it is told to."""

    def __init__(self, channel: TokenChannel):
        super().__init__(channel.address, {})
        self.channel, self.go = channel, asyncio.Event()

    async def generate(self, request: GenerateRequest, avoid: Sequence[str] = ()) -> None:
        self.requests.append(request)
        if request.request_id != "a":
            await self.go.wait()
        self.channel.dispatch(TokenBatch(engine_id="e", commands_to="", step=0, deltas=answer(request)))


async def test_sequence_whose_end_waits_for_a_slow_client_is_not_lost():
    """Seed 1164 of tests.days: another sequence of the request had ended before."""
    async with ingress() as one:
        pool = PromptPool(one.channel)
        asked = [request("a", max_tokens=2, min_tokens=2), request("b", max_tokens=12)]
        generation = one.generation(asked, pool, n=2)
        first, second = generation._sequences.values()
        ended = []
        async for chunk in generation.chunks():
            await until(lambda: first.lost)
            pool.go.set()
            await until(lambda: second.lost)
            ended += [chunk.finish_reason] if chunk.finish_reason else []
        assert len(ended) == len(pool.requests) == 2
        pool.close()


# -- the retry state alone -------------------------------------------------------------------------------------------


def tokens(*ids: int, **fields: Any) -> TokenDelta:
    return TokenDelta(request_id="a", token_ids=list(ids), **fields)


def test_next_attempt_has_what_is_left_until_the_first_token_is_wanted_and_nothing_once_it_has_come():
    asked = msgspec.structs.replace(request(), ttft_slo_s=2.0)
    retry = RetryState(asked, 3, now=100.0)
    assert retry.attempt(100.5).ttft_slo_s == 1.5
    assert retry.replay(EngineUnavailable("rank 0 died")) == "engine_unavailable"
    assert retry.attempt(103.0).ttft_slo_s == -1.0
    retry.add(tokens(8))
    assert retry.attempt(103.0).ttft_slo_s is None


def test_only_the_attempt_after_one_with_tokens_asks_for_the_same_numerics():
    """Else a request would come back again and again to an engine that refuses it."""
    retry = RetryState(request(), 3, now=0.0)
    assert retry.attempt(0.0).numerics == ""
    retry.numerics = "1"
    retry.replay(EngineUnavailable("rank 0 died"))
    assert retry.attempt(1.0).numerics == "1"
    retry.replay(EngineUnavailable("the replica is about to stop"))
    assert retry.attempt(2.0).numerics == ""


def test_next_attempt_has_the_output_in_its_prompt_and_what_is_left_of_the_time():
    retry = RetryState(request(timeout_s=10.0, prompt_logprobs=1), 3, now=100.0)
    assert retry.attempt(104.0) == request(timeout_s=6.0, prompt_logprobs=1)
    retry.add(tokens(8, 9))
    assert retry.replay(EngineUnavailable("rank 0 died")) == "engine_unavailable"
    again = retry.attempt(107.0)
    assert (again.request_id, again.prompt, again.num_prompt, again.timeout_s) == ("a.1", [*PROMPT, 8, 9], 3, 3.0)
    assert again.params.prompt_logprobs is None
    retry.add(tokens(10, position=2))
    assert retry.replay(TokensLost("a.1")) == "tokens_lost"
    assert retry.attempt(200.0).prompt == [*PROMPT, 8, 9, 10]
    assert 0 < (retry.attempt(200.0).timeout_s or 0) < 0.01
    assert retry.left_s(200.0) == 0.0


def test_request_that_is_aborted_after_its_deadline_has_timed_out():
    retry = RetryState(request(timeout_s=10.0), 3, now=100.0)
    aborted = sequence.Aborted("a")
    assert retry.failure(aborted, 109.0) is aborted
    assert isinstance(retry.failure(aborted, 115.0), RequestTimeout)


@pytest.mark.parametrize("last", [EngineUnavailable("rank 0 died"), TokensLost("a")])
def test_a_client_is_told_to_send_a_request_again_that_engines_or_the_network_have_lost(last):
    error = RetryState(request(), 0, now=0.0).failure(last, 1.0)
    assert isinstance(error, EngineUnavailable) and error.retryable and error.status == 503


def test_attempt_before_any_token_asks_for_all_that_the_first_one_did():
    retry = RetryState(request(timeout_s=None, prompt_logprobs=1, seed=7), 3, now=0.0)
    retry.replay(EngineUnavailable("rank 0 died"))
    again = retry.attempt(50.0)
    assert again == msgspec.structs.replace(retry.request, request_id="a.1", num_prompt=3)


@given(st.text(max_size=20), st.none() | st.integers(-(2**63), 2**63 - 1))
def test_all_attempts_have_one_seed(name, seed):
    retry = RetryState(request(name, seed=seed), 3, now=0.0)
    first = Request.create(retry.attempt(0.0), MAX_MODEL_LEN, 0.0)
    retry.replay(EngineUnavailable("rank 0 died"))
    assert Request.create(retry.attempt(0.0), MAX_MODEL_LEN, 0.0).seed == first.seed


def test_cached_tokens_are_those_of_the_attempt_that_gave_the_first_token():
    retry = RetryState(request(), 3, now=0.0)
    assert retry.add(tokens(1, num_cached_tokens=2)).num_cached_tokens == 2
    retry.replay(EngineUnavailable("rank 0 died"))
    assert retry.add(tokens(2, position=1, num_cached_tokens=4)).num_cached_tokens == 0


@pytest.mark.parametrize("position", [0, 1, 3])
def test_retry_state_takes_no_token_that_does_not_follow_the_last_one(position):
    retry = RetryState(request(), 3, now=0.0)
    retry.add(tokens(8, 9))
    with pytest.raises(TokensLost):
        retry.add(tokens(10, position=position))
    assert retry.output == [8, 9]
    assert retry.replay(TokensLost("a")) == "tokens_lost"


def test_waits_grow_and_end_with_the_deadline(monkeypatch):
    monkeypatch.setattr(retry_module, "BACK_OFF_S", 0.25)
    retry = RetryState(request(timeout_s=60.0), 9, now=0.0)
    waits = []
    for _ in range(6):
        waits.append(retry.back_off_s(0.0))
        retry.replay(EngineUnavailable("rank 0 died"))
    assert waits == [0.0, 0.25, 0.5, 1.0, 2.0, 2.0]
    assert retry.back_off_s(59.5) == 0.5
    assert retry.back_off_s(61.0) == 0.0


def test_requests_that_move_are_not_limited():
    """Replicas may be replaced one after the other, and a request that waits has no KV to take along."""
    state = RetryState(request(), max_replays=0, now=0.0)
    for moves in range(1, 10):
        assert state.replay(Moved("a"), engine="one") == "moved"
        assert (state.num_moves, state.num_replays, state.avoid) == (moves, 0, ["one"])
        assert state.back_off_s(0.0) == 0.0
    assert state.replay(EngineUnavailable("dead")) is None
