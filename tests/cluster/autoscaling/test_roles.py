"""Replicas change roles before new ones are requested."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.autoscaling.roles import KEEP_S, REPORT_S, YIELD_S, Member, RoleDecision, RoleScaler
from cluster.autoscaling.scaler import EngineCosts, ReplicaLoad
from cluster.autoscaling.slo import Limits, RoleSettings, Slo
from deployments.routing.config import Role

SLOTS = 10
LIMITS = Limits(
    min_replicas=1,
    max_replicas=3,
    max_num_seqs=SLOTS,
    upscale_delay_s=3.0,
    downscale_delay_s=60.0,
    scale_to_zero_delay_s=60.0,
)
COSTS = EngineCosts(decode_step_s=0.01, decode_sequence_s=0.001, token_s=0.001)
IDLE = ReplicaLoad(costs=COSTS, blocks_total=1000)


class World:
    """Replicas that report what the test says."""

    def __init__(self, replicas: int, *, max_total: int | None = None, initial_prefill: int = 1, **limits: Any):
        low = replicas if max_total is None else 2
        high = max_total or replicas
        own = replace(LIMITS, **{"max_replicas": high - 1, **limits})
        settings = RoleSettings(prefill=own, min_total=low, max_total=high, initial_prefill=initial_prefill)
        self.scaler = RoleScaler(Slo(ttft_ms=1000, itl_ms=100), own, settings)
        self.members: dict[str, Member] = {f"e{i}": Member("decode", IDLE) for i in range(replicas)}
        self.target, self.now = replicas, 0.0

    def run(self, seconds: int = 1, waiting: int = 0, **loads: ReplicaLoad) -> RoleDecision:
        """loads: by role, of each replica that has it."""
        for _ in range(seconds):
            self.now += 1
            for name, member in self.members.items():
                self.members[name] = Member(member.role, loads.get(member.role, IDLE))
            decision = self.scaler.decide(self.members, waiting, 0, self.target, len(self.members), self.now)
            self.target = decision.replicas
            self.members = {name: Member(decision.roles[name], m.load) for name, m in self.members.items()}
        return decision

    def count(self, role: Role) -> int:
        return sum(member.role == role for member in self.members.values())


def queued(tokens: int) -> ReplicaLoad:
    return replace(IDLE, queued_tokens=tokens, prefill_tokens_per_s=500, prefills_per_s=1)


@pytest.mark.parametrize(("replicas", "initial", "expected"), [(1, 1, 0), (2, 1, 1), (4, 2, 2), (4, 1, 1), (4, 3, 3)])
def test_the_roles_of_idle_replicas_are_those_of_the_configuration(replicas, initial, expected):
    world = World(replicas, initial_prefill=initial)
    world.run(30)
    assert world.count("prefill") == expected


def test_replicas_that_come_up_one_by_one_get_the_configured_roles():
    world = World(4, initial_prefill=2)
    names = list(world.members)
    world.members = {}
    for name in names:
        world.members[name] = Member("decode", IDLE)
        world.run()
    assert world.count("prefill") == 2


def test_a_queue_of_prompts_takes_a_replica_from_decode_within_a_decision_and_no_new_one_is_requested():
    world = World(4, max_total=8)
    world.run(20)
    assert world.count("prefill") == 1
    decision = world.run(prefill=queued(2500))
    assert world.count("prefill") == 3
    assert decision.replicas == 4 and decision.decisions["prefill"].reason == "queue"


def test_sequences_take_replicas_back_as_soon_as_prompts_do_not_need_them():
    world = World(4)
    world.run(20)
    world.run(5, prefill=queued(2500))
    assert world.count("prefill") == 3
    world.run(int(YIELD_S) + 2, waiting=3 * SLOTS)
    assert world.count("prefill") == 1


def test_roles_do_not_change_back_and_forth_while_both_need_more_than_there_is():
    world = World(3)
    world.run(20)
    splits = []
    for second in range(60):
        world.run(waiting=2 * SLOTS, prefill=queued(1500 + 1000 * (second % 2)))
        splits.append(world.count("prefill"))
    assert sum(a != b for a, b in pairwise(splits)) <= 1


def test_a_replica_that_is_not_needed_elsewhere_keeps_its_role():
    """Its prefix cache fits the role."""
    world = World(4)
    world.run(20)
    world.run(5, prefill=queued(2500))
    assert world.count("prefill") == 3
    world.run(int(10 * KEEP_S))
    assert world.count("prefill") == 3


def test_new_replicas_are_requested_for_what_both_roles_lack_together():
    world = World(3, max_total=8)
    world.run(20)
    busy = replace(IDLE, running=SLOTS)
    decision = world.run(2, waiting=2 * SLOTS, prefill=queued(2500), decode=busy)
    assert decision.replicas == 3, "not before the delay"
    decision = world.run(4, waiting=2 * SLOTS, prefill=queued(2500), decode=busy)
    assert decision.replicas > 3
    assert sum(one.replicas for one in decision.decisions.values()) == decision.replicas


def test_the_replica_with_the_least_to_do_changes():
    world = World(3)
    world.run()
    decode = [name for name, member in world.members.items() if member.role == "decode"]
    world.members[decode[0]] = Member("decode", replace(IDLE, running=5))
    world.members[decode[1]] = Member("decode", replace(IDLE, running=2))
    (prefill,) = [name for name in world.members if name not in decode]
    world.members[prefill] = Member("prefill", queued(5000))
    decision = world.scaler.decide(world.members, 0, 0, 3, 3, world.now + 1)
    assert decision.roles == {prefill: "prefill", decode[0]: "decode", decode[1]: "prefill"}


def test_a_new_controller_leaves_roles_as_they_are():
    world = World(4, initial_prefill=1)
    for name in ("e0", "e1", "e2"):
        world.members[name] = Member("prefill", IDLE)
    world.run(30)
    assert world.count("prefill") == 3


def test_a_new_controller_changes_no_role_before_all_replicas_have_reported():
    world = World(4, initial_prefill=1)
    roles: dict[str, Role] = {"e0": "prefill", "e1": "prefill", "e2": "decode", "e3": "prefill"}
    for number in range(5):
        members = {name: Member(roles[name], IDLE) for name in list(roles)[:number]}
        decision = world.scaler.decide(members, 0, 0, 4, 4, float(number))
        assert decision.roles == {name: roles[name] for name in members} and decision.replicas == 4


def test_roles_wait_for_a_silent_replica_for_a_few_seconds():
    world = World(4, initial_prefill=2)
    world.run(20)
    silent = next(name for name, member in world.members.items() if member.role == "prefill")
    del world.members[silent]
    began, before = world.now, {name: member.role for name, member in world.members.items()}
    while world.scaler.decide(world.members, 0, 0, 4, 4, world.now).roles == before:
        world.now += 1
    assert world.now == began + REPORT_S


def test_one_of_the_last_replicas_answers_although_none_has_to():
    world = World(3, max_total=4, initial_prefill=2, min_replicas=0, scale_to_zero_delay_s=5.0)
    world.run(30, prefill=queued(3000))
    assert world.count("decode") == 1


def test_a_dead_prefill_replica_is_replaced_at_once_by_one_that_answered():
    world = World(4, initial_prefill=2)
    world.run(20)
    dead = next(name for name, member in world.members.items() if member.role == "prefill")
    del world.members[dead]
    world.run()
    assert (world.count("prefill"), world.count("decode")) == (2, 1)
    world.members["new"] = Member("decode", IDLE)
    world.run()
    assert (world.count("prefill"), world.count("decode")) == (2, 2)


def test_idle_replicas_end_together_and_the_next_request_starts_one_that_answers():
    world = World(2, max_total=4, min_replicas=0, scale_to_zero_delay_s=5.0)
    world.scaler._settings = replace(world.scaler._settings, min_total=0)
    world.run(30)
    assert world.target == 0
    world.members = {}
    assert world.run(waiting=1).replicas >= 1
    world.members = {"new": Member("decode", IDLE)}
    assert world.run(waiting=1).roles == {"new": "decode"}


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 40), st.integers(0, 40), st.booleans()), max_size=30),
)
def test_each_replica_has_a_role_and_one_answers_whatever_the_load(replicas, seconds):
    world = World(replicas, max_total=6, initial_prefill=2)
    for tokens, running, waiting, dies in seconds:
        if dies and world.members:
            world.members.popitem()
        decision = world.run(waiting=waiting, prefill=queued(tokens), decode=replace(IDLE, running=running))
        assert decision.roles.keys() == world.members.keys()
        assert not world.members or "decode" in decision.roles.values()
        assert len(world.members) < 2 or "prefill" in decision.roles.values()
        assert 2 <= decision.replicas <= 6
        assert sum(one.replicas for one in decision.decisions.values()) == decision.replicas
