from __future__ import annotations

import random

import msgspec

from deployments.parts.tape.choice_log import ChoiceLog
from deployments.parts.tape.choice_record import RouterTape, choose_again
from deployments.routing.balancer import Balancer
from deployments.routing.config import RoutingConfig
from tests.deployments.routing.pools import BLOCK, PoolEngine, prompt

TOKENS = list(range(50))


def recorded(log: ChoiceLog, router: str = "ingress-1") -> RouterTape:
    (tape,) = log.take(router)
    return msgspec.msgpack.decode(tape, type=RouterTape)


def routed(log: ChoiceLog, number: int = 1) -> Balancer:
    """A router that has chosen among three engines; the second has the first prompt cached."""
    engines = [PoolEngine(f"decode-m-{name}", num_blocks=64) for name in "abc"]
    engines[1].take("before", TOKENS)
    engines[1].compute("before", TOKENS)
    router = Balancer(RoutingConfig(), "decode", BLOCK, random.Random(0))
    router.use_observer(log)
    for engine in engines:
        router.update(engine.snapshot())
    for i in range(number):
        router.choose(prompt(f"r{i}", [*TOKENS, i]), [engine.name for engine in engines])
    return router


def test_a_choice_tells_what_the_router_knew_of_each_engine_and_nothing_of_the_prompt():
    log = ChoiceLog(2**20, wall=lambda: 12.0)
    routed(log)
    tape = recorded(log)
    (choice,) = tape.read()
    assert (tape.router, tape.role, tape.policy, tape.cost.block_size) == ("ingress-1", "decode", "prefix_aware", BLOCK)
    assert (choice.at, choice.request_id, choice.num_tokens) == (12.0, "r0", 51)
    assert choice.ranked[0] == "decode-m-b" and choice.reason == "longest_prefix"
    assert {name: known.cached > 0 for name, known in choice.known.items()} == {
        "decode-m-a": False, "decode-m-b": True, "decode-m-c": False
    }  # fmt: skip
    key = prompt("", TOKENS).keys[0]
    assert msgspec.msgpack.encode(key) not in msgspec.msgpack.encode(tape)


def test_another_rule_is_found_at_the_first_choice_that_differs(monkeypatch):
    log = ChoiceLog(2**20)
    routed(log)
    tape = recorded(log)
    (choice,) = tape.read()
    assert choose_again(tape, choice).differs(choice) == ""
    by_name = "deployments.routing.cost.RoutingCost.total", lambda cost, prompt, candidate: ord(candidate.engine[-1])
    monkeypatch.setattr(*by_name)
    assert choose_again(tape, choice).differs(choice).startswith("the order is decode-m-a")


def test_the_oldest_choices_are_dropped():
    log = ChoiceLog(3000)
    routed(log, 50)
    names = [choice.request_id for choice in recorded(log).read()]
    assert 2 < len(names) < 50 and names == [f"r{i}" for i in range(50 - len(names), 50)]


def test_a_router_without_choices_has_no_tape():
    log = ChoiceLog(2**20)
    routed(log, 0)
    assert log.take("i") == []
