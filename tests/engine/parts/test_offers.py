"""Where the KV of a prompt comes from, if more than one place has it."""

from __future__ import annotations

import pytest

from engine.core.request import State
from engine.costs.step_cost import StepCost, StepTimes, StepWork
from engine.options.handoff import HandoffConfig
from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.handoffs.remote_prefill_policy import RemotePrefillPolicy
from engine.wire.parts.handoffs import PrefillReplica
from engine.wire.remote_request import Peer
from tests.fake_caches import TieredCacheHarness
from tests.fake_tiers import TierHarness

PROMPT = list(range(1, 42))  # ten blocks and a token
TOKEN_S = 0.1


def learn_compute(times: StepTimes) -> None:
    """Let an engine learn that a token of a prompt takes TOKEN_S."""
    for _ in range(9):
        times.observe_step(StepWork(0, 100, 1), 100 * TOKEN_S)


def in_tier_and_elsewhere(load_s: float, fetch_s: float, tier: int, elsewhere: int) -> TieredCacheHarness:
    """An engine whose tier has the first `tier` tokens of PROMPT, and that hears that another has the first
    `elsewhere`. load_s, fetch_s: what every load and every fetch has taken so far."""
    harness = TieredCacheHarness(num_blocks=32, max_model_len=64, disk_blocks=100)
    harness.add("before", PROMPT[: tier + 1], max_tokens=1)
    harness.run()
    harness.scheduler.kv_cache.clear_cache()
    harness.offloading.tiers[0].cost.observe(1.0, load_s)
    harness.fetching.link_cost.observe(1.0, fetch_s)
    harness.add("a", PROMPT, held=elsewhere, max_tokens=1)
    return harness


def taken(harness: TieredCacheHarness) -> str:
    """Where the KV of the prompt that waits comes from first. It comes, and the prompt is answered."""
    harness.step()
    source = "tier" if harness.offloading.keeps() else "elsewhere" if harness.open else "here"
    harness.run()
    assert "a" in harness.finished
    return source


@pytest.mark.parametrize(("load_s", "fetch_s", "source"), [(0.1, 0.2, "tier"), (0.2, 0.1, "elsewhere"), (9, 9, "here")])
def test_the_faster_of_two_places_that_have_the_same_tokens_sends_them(load_s, fetch_s, source):
    harness = in_tier_and_elsewhere(load_s, fetch_s, 40, 40)
    learn_compute(harness.step_times)
    assert taken(harness) == source


@pytest.mark.parametrize(("load_s", "source"), [(1.9, "tier"), (2.1, "elsewhere")])
def test_a_place_that_has_more_may_take_as_much_longer_as_the_rest_takes_to_compute(load_s, source):
    harness = in_tier_and_elsewhere(load_s, 0.1, 40, 20)
    learn_compute(harness.step_times)  # the 20 tokens that the other engine lacks take 2 s, less 0.1 s
    assert taken(harness) == ("tier" if load_s < 0.1 + 20 * TOKEN_S else "elsewhere") == source


def test_the_tier_comes_first_among_equals_and_while_nobody_knows_what_computing_takes():
    equal = in_tier_and_elsewhere(0.1, 0.1, 40, 40)
    learn_compute(equal.step_times)
    assert taken(equal) == "tier"
    assert taken(in_tier_and_elsewhere(0.2, 0.1, 40, 40)) == "tier"


def with_prefill_engine(policy: str, load_s: float) -> TierHarness:
    """An engine that has all but one token of PROMPT in a tier, and could have the prompt computed by an engine that
    takes 0.01 s for each token."""
    costs = StepCost()
    for tokens in (1, 8, 64, 512):
        costs.observe_step(tokens, TOKEN_S * tokens)
    remote = RemotePrefillPolicy(HandoffConfig(role="decode", policy="never"), costs)
    harness = TierHarness(
        num_blocks=32,
        max_model_len=64,
        disk_blocks=100,
        handoffs=Handoffs(remote, Peer("decode", "", 1), "print"),
    )
    harness.add("before", PROMPT, max_tokens=1)
    harness.run()
    harness.scheduler.kv_cache.clear_cache()
    learn_compute(harness.step_times)
    remote.config = HandoffConfig(role="decode", policy=policy)
    remote.replicas = [
        PrefillReplica(engine_id="prefill", queued_tokens=0, seconds_per_step=0.0, seconds_per_token=0.01)
    ]
    harness.offloading.tiers[0].cost.observe(1.0, load_s)
    harness.add("a", PROMPT, max_tokens=1)
    return harness


@pytest.mark.parametrize(
    ("policy", "load_s", "state"),
    [
        ("auto", 0.1, State.LOADING_KV),  # and 0.1 s for the token that the tier lacks; remotely 0.42 s
        ("auto", 0.5, State.WAITING_FOR_REMOTE_KV),
        ("always", 0.5, State.LOADING_KV),  # what computing elsewhere takes does not matter, so the order decides
    ],
)
def test_a_prompt_is_computed_elsewhere_if_that_is_faster_than_what_its_tier_saves(policy, load_s, state):
    harness = with_prefill_engine(policy, load_s)
    (request,) = harness.scheduler.queue.live.values()
    harness.scheduler.schedule(harness.now)
    assert request.state is state
