"""Whatever happens to a router and its engines, its choices are made again from their log."""

from __future__ import annotations

import msgspec
from hypothesis import settings

from deployments.parts.tape.choice_log import ChoiceLog
from deployments.parts.tape.choice_record import RouterTape, choose_again
from tests.deployments.routing.test_routing_machine import PowerOfTwoMachine, RoundRobinMachine, RoutingMachine


class Logged(RoutingMachine):
    def __init__(self) -> None:
        super().__init__()
        self.log = ChoiceLog(2**20)
        self.router.use_observer(self.log)

    def teardown(self) -> None:
        for tape in (msgspec.msgpack.decode(data, type=RouterTape) for data in self.log.take("ingress")):
            choices = tape.read()
            assert [choose_again(tape, choice).differs(choice) for choice in choices] == [""] * len(choices)
            assert len({choice.request_id for choice in choices}) == self.count
        super().teardown()


class LoggedPowerOfTwo(Logged, PowerOfTwoMachine):
    pass


class LoggedRoundRobin(Logged, RoundRobinMachine):
    pass


TestPrefixAware, TestPowerOfTwo = Logged.TestCase, LoggedPowerOfTwo.TestCase
TestRoundRobin = LoggedRoundRobin.TestCase
TestPrefixAware.settings = settings(max_examples=20, stateful_step_count=40)
TestPowerOfTwo.settings = TestRoundRobin.settings = settings(max_examples=10, stateful_step_count=40)
