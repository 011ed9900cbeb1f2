import pytest

from engine.costs.step_cost import StepCost
from engine.options.handoff import HandoffConfig
from engine.parts.handoffs.remote_prefill_policy import (
    MIN_TOKENS,
    LocalLoad,
    PendingPrompt,
    RemotePrefillPolicy,
)
from engine.wire.parts.handoffs import PrefillReplica

TOKEN_S = 0.001
LONG = PendingPrompt(1000, 0)


def replica(name: str = "p", queued: int = 0, token_s: float = TOKEN_S) -> PrefillReplica:
    return PrefillReplica(engine_id=name, queued_tokens=queued, seconds_per_step=0.002, seconds_per_token=token_s)


def make(
    option: str = "auto", replicas: list[PrefillReplica] | None = None, quarantined: set[str] | None = None
) -> RemotePrefillPolicy:
    """Make the policy of an engine whose steps cost 2 ms and 1 ms per token."""
    cost = StepCost()
    for tokens in (1, 8, 64, 512):
        cost.observe_step(tokens, 0.002 + TOKEN_S * tokens)
    policy = RemotePrefillPolicy(HandoffConfig(role="decode", policy=option), cost)
    policy.resting = sorted(quarantined or ())
    policy.replicas = replicas
    return policy


# -- where -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "prompt", "load", "remote", "reason"),
    [
        (make("never", [replica()]), LONG, LocalLoad(), False, "policy"),
        (make("always"), LONG, LocalLoad(), True, "policy"),
        (make("always", [replica()]), PendingPrompt(1, 0), LocalLoad(), True, "policy"),
        (make("always", []), LONG, LocalLoad(), False, "no_prefill_replica"),
        (make("always", [replica("a")], {"a"}), LONG, LocalLoad(), False, "quarantined"),
        (make("always", [replica()]), PendingPrompt(1000, 0, "attempts"), LocalLoad(), False, "attempts"),
        (make(), LONG, LocalLoad(), False, "no_prefill_replica"),
        (make(replicas=[]), LONG, LocalLoad(), False, "no_prefill_replica"),
        (make(replicas=[replica("a"), replica("b")], quarantined={"a", "b"}), LONG, LocalLoad(), False, "quarantined"),
        (make(replicas=[replica()]), PendingPrompt(MIN_TOKENS - 1, 0), LocalLoad(decoding=9), False, "short_prompt"),
        (
            make(replicas=[replica()]),
            PendingPrompt(1000, 1000 - MIN_TOKENS + 1),
            LocalLoad(decoding=9),
            False,
            "cached",
        ),
        (make(replicas=[replica(queued=5000)]), LONG, LocalLoad(), False, "saturated"),
        (make(replicas=[replica()]), LONG, LocalLoad(decoding=1), True, "cheaper_remote"),
        (make(replicas=[replica()]), LONG, LocalLoad(queued=3000), True, "cheaper_remote"),
        (make(replicas=[replica(queued=900)]), LONG, LocalLoad(), False, "cheaper_local"),
        (make(replicas=[replica(queued=900), replica("b")]), LONG, LocalLoad(decoding=1), True, "cheaper_remote"),
        (make(replicas=[replica(token_s=0.01)]), LONG, LocalLoad(), False, "cheaper_local"),
        (make(replicas=[replica(token_s=0.01)]), LONG, LocalLoad(decoding=20), True, "cheaper_remote"),
        (make(replicas=[replica(token_s=0.0)]), LONG, LocalLoad(decoding=1), True, "cheaper_remote"),
        (make(replicas=[replica()]), LONG, LocalLoad(receiving=9000), False, "saturated"),
    ],
)
def test_a_prompt_goes_where_it_costs_everyone_least(policy, prompt, load, remote, reason):
    decision = policy.decide(prompt, load)
    assert (decision.remote, decision.reason) == (remote, reason)
    assert not policy.decisions, "only what is carried out is counted"


def test_an_engine_that_has_never_computed_a_prompt_computes_one_to_learn_what_it_costs():
    policy = RemotePrefillPolicy(HandoffConfig(role="decode"), StepCost())
    policy.replicas = [replica()]
    assert policy.decide(LONG, LocalLoad()).reason in ("saturated", "cheaper_local")


def test_near_a_draw_the_choice_stays_as_it_is():
    def choose(last: LocalLoad) -> bool:
        policy = make(replicas=[replica(queued=1000)])
        decision = policy.decide(LONG, last)
        policy.count(decision.remote, decision.reason)
        return policy.decide(LONG, LocalLoad(decoding=1)).remote

    assert choose(LocalLoad(decoding=9)), "it was remote"
    assert not choose(LocalLoad()), "it was local"


def test_a_slow_link_keeps_prompts_here_until_it_is_tried_again():
    policy = make(replicas=[replica()])
    busy = LocalLoad(decoding=1)
    for _ in range(3):
        policy.received(LONG, 0, 10.0)
    decisions = []
    for _ in range(200):
        decisions.append(policy.decide(LONG, busy))
        policy.count(decisions[-1].remote, decisions[-1].reason)
    assert decisions[0].reason == "cheaper_local"
    assert decisions[-1].reason == "cheaper_remote"
    assert policy.decisions["local", "cheaper_local"] + policy.decisions["remote", "cheaper_remote"] == 200


def test_prompts_that_prefill_has_cached_cost_little_there():
    policy = make(replicas=[replica(token_s=0.002)])
    assert policy.decide(LONG, LocalLoad()).reason == "cheaper_local"
    for _ in range(50):
        policy.received(LONG, 900, 0.21)
    assert policy.decide(LONG, LocalLoad()).reason == "cheaper_remote"
