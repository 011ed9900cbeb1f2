from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from cluster.lab.recorded.prediction import cautions
from cluster.lab.recorded.recording import Recording
from cluster.lab.simulator.cluster import simulate
from cluster.lab.simulator.trace import Trace
from deployments.parts.tape.choice_record import RouterTape
from deployments.routing.cost import RoutingCost
from engine.parts.tape.file import pack_tapes, read_file
from tests.cluster.lab.recorded.taped_engine import record
from tests.cluster.lab.simulator.small_cluster import small_cluster

COST = RoutingCost(block_size=4, prefix_weight=2.0, running_weight=0.25)
CALM = Trace("calm", np.array([0.0, 100.0]), np.array([20, 20]), np.array([5, 5]))


def test_the_routers_policy_is_that_of_the_tape(tmp_path):
    file = record(tmp_path, "engine-1")
    assert Recording.of_files([file]).spec().router == "prefix_aware"
    router = RouterTape(router="ingress", role="decode", policy="round_robin", cost=COST, choices=[])
    file.write_bytes(pack_tapes(read_file(file).engines, [msgspec.msgpack.encode(router)]))
    assert Recording.of_files([file]).spec().router == "round_robin"


def test_another_number_of_engines_that_share_cores_is_warned_of():
    two = replace(small_cluster(replicas=2), contention=0.5)
    three, bigger = replace(two, replicas=3), replace(two, num_blocks=500)
    assert "share cores" in cautions(two, three, simulate(three, CALM))[0]
    assert not cautions(two, bigger, simulate(bigger, CALM))
    apart = small_cluster(replicas=2)
    assert not cautions(apart, replace(apart, replicas=3), simulate(apart, CALM))


def test_engines_that_compute_nearly_all_the_time_are_warned_of():
    busy = Trace("busy", np.zeros(8), np.full(8, 20), np.full(8, 50))
    spec = small_cluster(replicas=1)
    assert "so near their limit" in cautions(spec, spec, simulate(spec, busy))[0]
