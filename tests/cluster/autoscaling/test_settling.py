"""A load that stays the same ends in replicas that stay the same, and that meet the targets."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.autoscaling.slo import Slo
from tests.cluster.autoscaling.world import Traffic, World
from tests.examples import examples

SLO = Slo(ttft_ms=1000, itl_ms=30)

open_loop = st.builds(
    Traffic,
    requests_per_s=st.floats(0.5, 60),
    prompt_tokens=st.sampled_from([0, 10, 100, 1000, 3000]),
    output_tokens=st.sampled_from([10, 100, 300]),
)
closed_loop = st.builds(Traffic, clients=st.integers(1, 600), output_tokens=st.just(100))


@settings(max_examples=examples(40))
@given(traffic=st.one_of(open_loop, closed_loop), replicas=st.integers(1, 40), blocks=st.sampled_from([1, 20, 60]))
def test_constant_load_ends_in_constant_replicas_wherever_it_began(traffic, replicas, blocks):
    world = World(SLO, replicas=replicas, blocks_per_sequence=blocks)
    world.run(traffic, 700)
    before = world.wanted
    world.run(traffic, 400)
    # one step down may still come, if the load sits where a step is nearly allowed
    assert world.changes(400) <= 1 and before - world.wanted in (0, 1)


# fewest: replicas whose steps take 27 ms, nine tenths of the target, by hand
@pytest.mark.parametrize(
    ("traffic", "fewest"),
    [
        (Traffic(requests_per_s=40), 4),
        (Traffic(clients=200), 6),
        (Traffic(requests_per_s=10, prompt_tokens=1000), 4),
    ],
)
@pytest.mark.parametrize("replicas", [1, 30])
def test_the_itl_target_is_met_by_about_as_many_replicas_as_that_takes(traffic, fewest, replicas):
    world = World(SLO, replicas=replicas)
    world.run(traffic, 900)
    assert world.step_s <= SLO.itl_ms / 1000
    assert fewest <= world.wanted <= 1.5 * fewest


def test_what_cannot_be_met_by_any_number_of_replicas_is_not_bought():
    slow = World(Slo(ttft_ms=1000, itl_ms=5), max_num_seqs=64)  # a step takes 10 ms
    slow.run(Traffic(clients=20), 300)
    assert slow.wanted == 1


def test_a_burst_is_answered_at_once_and_its_replicas_stay_for_the_downscale_delay():
    world = World(SLO, downscale_delay_s=60)
    world.run(Traffic(clients=1), 60)
    assert world.wanted == 1
    world.run(Traffic(clients=500), 30)
    high = world.wanted
    assert high >= 4
    world.run(Traffic(clients=1), 50)
    assert world.wanted >= high
    world.run(Traffic(clients=1), 60)
    assert world.wanted == 1


def test_a_pool_that_may_sleep_does_so_when_idle_and_wakes_for_a_request():
    world = World(SLO, min_replicas=0, replicas=0)
    world.run(Traffic(), 2)
    assert world.wanted == 1, "what is new shows first that it starts"
    world.run(Traffic(), 45)
    assert world.wanted == 0 and world.up == 0
    world.run(Traffic(requests_per_s=1.0), 2)
    assert world.wanted == 1


def test_a_replica_that_takes_long_to_start_is_not_idle_meanwhile():
    world = World(SLO, min_replicas=0, replicas=0, startup_s=100)
    world.run(Traffic(), 99)
    assert world.wanted == 1 and world.up == 0
    world.run(Traffic(), 45)
    assert world.wanted == 0


def test_a_pool_that_must_not_sleep_keeps_its_least():
    world = World(SLO, min_replicas=2, replicas=5)
    world.run(Traffic(), 200)
    assert world.wanted == 2
