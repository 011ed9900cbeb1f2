from __future__ import annotations

import random
from collections import Counter

import pytest

from deployments.routing.cost import EngineCandidate, RoutingCost
from deployments.routing.policies import PowerOfTwo, PrefixAware, RoundRobin, RoutingPolicy, rendezvous_order
from deployments.routing.prompt_digest import PromptDigest, PromptDigester
from engine.wire.stats.engine_stats import EngineLoad
from tests.deployments.routing.pools import BLOCK, block_hashes, prompt

ENGINES = ["a", "b", "c", "d"]
COST = RoutingCost(block_size=4, prefix_weight=2.0, running_weight=0.25)


class Pool:
    """Engines with so many sequences each, and which of them a policy has looked up."""

    def __init__(self, **sequences: int):
        self.engines, self.looked_up = list(sequences), set[str]()
        self._sequences = sequences

    def lookup(self, engine: str) -> EngineCandidate:
        self.looked_up.add(engine)
        return EngineCandidate(engine, EngineLoad(sequences=self._sequences[engine]), 0)

    def rank(self, policy: RoutingPolicy, asked: PromptDigest) -> list[str]:
        ranked, _ = policy.rank(asked, self.engines, self.lookup)
        assert sorted(ranked) == sorted(self.engines)
        return ranked


def request(number: int = 0) -> PromptDigest:
    return PromptDigest(f"r{number}", 10, ())


def test_round_robin_takes_each_in_turn_and_keeps_its_place_when_replicas_come_and_go():
    policy = RoundRobin()

    def turn(block_hashes: str) -> str:
        pool = Pool(**dict.fromkeys(block_hashes, 0))
        best = pool.rank(policy, request())[0]
        assert not pool.looked_up
        return best

    assert [turn("bac") for _ in range(4)] == ["a", "b", "c", "a"]
    assert turn("acd") == "c"
    assert turn("abd") == "d"
    assert turn("b") == "b"


def test_power_of_two_takes_the_less_busy_of_two_so_never_the_busiest_of_all():
    policy, pool = PowerOfTwo(random.Random(0)), Pool(a=0, b=1, c=2, d=3)
    ranked = [pool.rank(policy, request()) for _ in range(6000)]
    assert sorted({order[0] for order in ranked}) == ["a", "b", "c"]
    # of the six pairs `a` is in three, `b` is the better one in two, `c` in one
    pairs = Counter("".join(order[:2]) for order in ranked)
    assert {pair: round(count / 1000) for pair, count in pairs.items()} == dict.fromkeys(
        ["ab", "ac", "ad", "bc", "bd", "cd"], 1
    )
    assert Pool(a=1).rank(policy, request()) == ["a"]


def test_power_of_two_looks_up_two_engines():
    for number in range(9):
        pool = Pool(a=0, b=1, c=2, d=3)
        ranked = pool.rank(PowerOfTwo(random.Random(number)), request())
        assert pool.looked_up == set(ranked[:2])


def test_costs_are_in_blocks_of_prompt():
    """30 tokens of which 3 blocks are cached, behind 8 tokens, beside 12 blocks in use."""
    asked = PromptDigest("r", 30, range(7))
    candidate = EngineCandidate("a", EngineLoad(sequences=1, queued_tokens=8, blocks_used=12), cached=3)
    assert COST.uncached(asked, candidate) == 4.5
    assert COST.total(asked, candidate) == 2 * 4.5 + 8 / 4 + 0.25 * 12
    assert COST.new_blocks(asked, candidate) == 5


def test_the_last_token_of_a_prompt_is_never_taken_to_be_cached():
    asked = PromptDigest("r", 16, range(4))
    assert COST.cached_tokens(asked, EngineCandidate("a", EngineLoad(), cached=4)) == 12


def test_equal_prompts_go_to_the_same_of_equal_engines_from_every_router():
    tokens = list(range(20))
    policy, equal = PrefixAware(COST), Pool(a=0, b=0, c=0)
    assert len({equal.rank(policy, prompt(f"r{n}", tokens))[0] for n in range(9)}) == 1
    assert {equal.rank(policy, prompt("r", [n, *tokens]))[0] for n in range(20, 40)} == {"a", "b", "c"}


@pytest.mark.parametrize("key", ["s1", "s2", "s3"])
def test_rendezvous_order_of_the_others_stays_when_one_goes(key):
    order = rendezvous_order(key, ENGINES)
    assert sorted(order) == ENGINES
    for gone in ENGINES:
        assert rendezvous_order(key, [n for n in ENGINES if n != gone]) == [n for n in order if n != gone]


def test_a_prompt_is_read_once_for_all_its_answers_and_hashes_blocks_as_engines_do():
    tokens = list(range(11))
    reader = PromptDigester(BLOCK)
    first, second = reader.digest("a", tokens, "salt"), reader.digest("b", tokens, "salt", "session")
    assert first.keys is second.keys
    assert (second.request_id, second.num_tokens, second.session) == ("b", 11, "session")
    assert reader.digest("c", tokens, "").keys == prompt("c", tokens).keys != first.keys
    assert len(first.keys) == len(block_hashes(tokens)) == 2
    assert PromptDigester(None).digest("a", tokens, "").keys == ()
