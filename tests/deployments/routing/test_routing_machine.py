"""A router and its engines, with everything that can happen in any order: after each report, what the router believes
is what is so."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deployments.routing.balancer import Balancer
from deployments.routing.config import PolicyName, RoutingConfig
from deployments.routing.prefix_index import block_keys
from tests.deployments.routing.pools import BLOCK, PoolEngine, prompt

ENGINES = ["decode-m-a", "decode-m-b", "decode-m-c"]
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=20)  # few symbols, so that many prefixes are shared


class RoutingMachine(RuleBasedStateMachine):
    policy: PolicyName = "prefix_aware"

    def __init__(self) -> None:
        super().__init__()
        self.router = Balancer(RoutingConfig(policy=self.policy), "decode", BLOCK, random.Random(0))
        self.engines = {name: PoolEngine(name, num_blocks=16) for name in ENGINES}
        self.on_way: dict[str, tuple[str, list[int]]] = {}  # requests that were sent and have not arrived
        self.there: dict[str, tuple[str, list[int]]] = {}  # that their engine has
        self.count = 0
        for engine in self.engines.values():
            self.router.update(engine.snapshot())

    @rule(tokens=TOKENS, session=st.sampled_from(["", "", "s", "t"]))
    def send(self, tokens: list[int], session: str) -> None:
        self.count += 1
        name = f"r{self.count}"
        decision = self.router.choose(prompt(name, tokens, session), list(self.engines))
        assert sorted(decision.engines) == sorted(self.engines)
        assert 0 <= decision.cached_tokens < len(tokens)
        self.on_way[name] = (decision.engines[0], tokens)

    @precondition(lambda self: self.on_way)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.on_way)))
        self.there[name] = engine, tokens = self.on_way.pop(name)
        self.engines[engine].take(name, tokens)

    @precondition(lambda self: self.on_way)
    @rule(data=st.data())
    def get_lost_on_the_way(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.on_way)))
        del self.on_way[name]
        self.router.end(name, confirmed=False)

    @precondition(lambda self: self.on_way)
    @rule(data=st.data())
    def be_refused_by_its_replica(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.on_way)))
        engine, tokens = self.on_way[name]
        others = [other for other in self.engines if other != engine]
        self.on_way[name] = (self.router.choose(prompt(name, tokens), others).engines[0], tokens)

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.there)))
        engine, tokens = self.there[name]
        if name in self.engines[engine].queued:
            self.engines[engine].compute(name, tokens)

    @precondition(lambda self: self.there)
    @rule(data=st.data(), answered=st.booleans())
    def end(self, data: st.DataObject, answered: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.there)))
        engine, _ = self.there.pop(name)
        self.engines[engine].end(name)
        self.router.end(name, confirmed=answered)

    @rule(name=st.sampled_from(ENGINES), lost=st.booleans())
    def report(self, name: str, lost: bool) -> None:
        engine = self.engines[name]
        update = engine.update()
        if lost:
            update = engine.update()  # and the one before never came
        if not self.router.update(update):
            assert lost
            assert self.router.update(engine.snapshot())
        self.check_truth(engine)

    @rule(name=st.sampled_from(ENGINES))
    def die_and_be_replaced(self, name: str) -> None:
        for requests in (self.on_way, self.there):
            for request_id in [r for r, (engine, _) in requests.items() if engine == name]:
                del requests[request_id]
                self.router.end(request_id, confirmed=False)
        self.router.mark_unhealthy(name)
        self.router.keep([other for other in ENGINES if other != name], now=0.0)
        self.engines[name] = PoolEngine(name, num_blocks=16)
        self.router.update(self.engines[name].snapshot())

    def check_truth(self, engine: PoolEngine) -> None:
        """Just after its report."""
        assert self.router.placements.engine(engine.name).prefixes.stored.to_set() == set(
            block_keys(b"".join(engine.pool.block_hashes()))
        )
        sent = [name for name, (where, _) in self.on_way.items() if where == engine.name]
        assert sorted(self.router.placements.engine(engine.name).pending) == sorted(sent)
        load, truth = self.router.placements.engine(engine.name).load, engine.load()
        assert load.sequences == truth.sequences + len(sent)
        if not sent:
            assert load == truth
        coming = [tokens for where, tokens in [*self.on_way.values(), *self.there.values()] if where == engine.name]
        for tokens in ([0] * 20, [1] * 20, *coming):
            keys = prompt("", tokens).keys
            if not coming:
                assert self.router.placements.engine(engine.name).prefixes.match(keys) == engine.cached(tokens)
            assert self.router.placements.engine(engine.name).prefixes.match(keys) >= engine.cached(tokens)

    @invariant()
    def nothing_is_negative_and_the_sums_are_right(self) -> None:
        self.router.placements.check()
        for name in ENGINES:
            load = self.router.placements.engine(name).load
            assert min(load.sequences, load.queued_tokens, load.blocks_used) >= 0
            self.engines[name].pool.check()

    def teardown(self) -> None:
        """When everything has ended and been reported, nothing is expected any more."""
        for name in list(self.on_way):
            self.router.end(name, confirmed=False)
        for name, (engine, _) in self.there.items():
            self.engines[engine].end(name)
            self.router.end(name, confirmed=True)
        for engine in self.engines.values():
            self.router.update(engine.snapshot())
            assert self.router.placements.engine(engine.name).load == engine.load()
            for tokens in ([0] * 20, [1] * 20, [0, 1] * 10):
                assert self.router.placements.engine(engine.name).prefixes.match(
                    prompt("", tokens).keys
                ) == engine.cached(tokens)


class PowerOfTwoMachine(RoutingMachine):
    policy = "power_of_two"


class RoundRobinMachine(RoutingMachine):
    policy = "round_robin"


TestRouting = RoutingMachine.TestCase
TestPowerOfTwo = PowerOfTwoMachine.TestCase
TestRoundRobin = RoundRobinMachine.TestCase
TestRouting.settings = settings(max_examples=40, stateful_step_count=40)
TestPowerOfTwo.settings = TestRoundRobin.settings = settings(max_examples=10, stateful_step_count=40)
