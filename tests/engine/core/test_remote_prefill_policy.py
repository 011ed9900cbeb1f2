import pytest

from engine.config import HandoffConfig
from engine.core.remote_prefill_policy import MIN_TOKENS, Load, Prompt, RemotePrefillPolicy
from engine.core.step_cost import StepCost
from engine.wire.messages import PrefillReplica

TOKEN_S = 0.001
LONG = Prompt(1000, 0)


def replica(name: str = "p", queued: int = 0, token_s: float = TOKEN_S) -> PrefillReplica:
    return PrefillReplica(engine_id=name, queued_tokens=queued, seconds_per_step=0.002, seconds_per_token=token_s)


def make(
    policy: str = "auto", replicas: list[PrefillReplica] | None = None, resting: set[str] | None = None
) -> RemotePrefillPolicy:
    """Of an engine whose steps cost 2 ms and 1 ms per token."""
    cost = StepCost()
    for tokens in (1, 8, 64, 512):
        cost.stepped(tokens, 0.002 + TOKEN_S * tokens)
    placing = RemotePrefillPolicy(HandoffConfig(role="decode", policy=policy), cost, lambda: resting or set())
    placing.replicas = replicas
    return placing


# -- where -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placing", "prompt", "load", "remote", "reason"),
    [
        (make("never", [replica()]), LONG, Load(), False, "policy"),
        (make("always"), LONG, Load(), True, "policy"),
        (make("always", [replica()]), Prompt(1, 0), Load(), True, "policy"),
        (make("always", []), LONG, Load(), False, "no_prefill_replica"),
        (make("always", [replica("a")], {"a"}), LONG, Load(), False, "resting"),
        (make("always", [replica()]), Prompt(1000, 0, "attempts"), Load(), False, "attempts"),
        (make(), LONG, Load(), False, "no_prefill_replica"),
        (make(replicas=[]), LONG, Load(), False, "no_prefill_replica"),
        (make(replicas=[replica("a"), replica("b")], resting={"a", "b"}), LONG, Load(), False, "resting"),
        (make(replicas=[replica()]), Prompt(MIN_TOKENS - 1, 0), Load(decoding=9), False, "short_prompt"),
        (make(replicas=[replica()]), Prompt(1000, 1000 - MIN_TOKENS + 1), Load(decoding=9), False, "cached"),
        (make(replicas=[replica(queued=5000)]), LONG, Load(), False, "saturated"),
        (make(replicas=[replica()]), LONG, Load(decoding=1), True, "cheaper_remote"),
        (make(replicas=[replica()]), LONG, Load(queued=3000), True, "cheaper_remote"),
        (make(replicas=[replica(queued=900)]), LONG, Load(), False, "cheaper_local"),
        (make(replicas=[replica(queued=900), replica("b")]), LONG, Load(decoding=1), True, "cheaper_remote"),
        (make(replicas=[replica(token_s=0.01)]), LONG, Load(), False, "cheaper_local"),
        (make(replicas=[replica(token_s=0.01)]), LONG, Load(decoding=20), True, "cheaper_remote"),
        (make(replicas=[replica(token_s=0.0)]), LONG, Load(decoding=1), True, "cheaper_remote"),
        (make(replicas=[replica()]), LONG, Load(receiving=9000), False, "saturated"),
    ],
)
def test_a_prompt_goes_where_it_costs_everyone_least(placing, prompt, load, remote, reason):
    decision = placing.decide(prompt, load)
    assert (decision.remote, decision.reason) == (remote, reason)
    assert not placing.decisions, "only what is carried out is counted"


def test_an_engine_that_has_never_computed_a_prompt_computes_one_to_learn_what_it_costs():
    placing = RemotePrefillPolicy(HandoffConfig(role="decode"), StepCost())
    placing.replicas = [replica()]
    assert placing.decide(LONG, Load()).reason in ("saturated", "cheaper_local")


def test_near_a_draw_the_choice_stays_as_it_is():
    def choose(last: Load) -> bool:
        placing = make(replicas=[replica(queued=1000)])
        placing.count(placing.decide(LONG, last))
        return placing.decide(LONG, Load(decoding=1)).remote

    assert choose(Load(decoding=9)), "it was remote"
    assert not choose(Load()), "it was local"


def test_a_slow_link_keeps_prompts_here_until_it_is_tried_again():
    placing = make(replicas=[replica()])
    busy = Load(decoding=1)
    for _ in range(3):
        placing.received(LONG, 0, 10.0)
    decisions = []
    for _ in range(200):
        decisions.append(placing.decide(LONG, busy))
        placing.count(decisions[-1])
    assert decisions[0].reason == "cheaper_local"
    assert decisions[-1].reason == "cheaper_remote"
    assert placing.decisions["local", "cheaper_local"] + placing.decisions["remote", "cheaper_remote"] == 200


def test_prompts_that_prefill_has_cached_cost_little_there():
    placing = make(replicas=[replica(token_s=0.002)])
    assert placing.decide(LONG, Load()).reason == "cheaper_local"
    for _ in range(50):
        placing.received(LONG, 900, 0.21)
    assert placing.decide(LONG, Load()).reason == "cheaper_remote"
