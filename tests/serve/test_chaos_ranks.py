"""Whatever dies under clients with keys, where prefill and decode replicas have two ranks each: every client has the
text of a run in which nothing dies.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.models import make_model
from tests.resuming_client import ResumingClient, read_all
from tests.serve.chaos_cluster import MODEL, ChaosCluster, Role, kill
from tests.serve.serve_run import wait_until

pytestmark = [
    pytest.mark.serve,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="Ray brings HAProxy for Linux only"),
]

NODES: dict[Role, dict[str, Any]] = {
    "decode": {"num_cpus": 1, "labels": {"pool": "decode"}},  # each has room for one replica
    "prefill": {"num_cpus": 1, "labels": {"pool": "prefill"}},
}
HEAD = {"num_cpus": 1, "labels": {"pool": "head"}}
INGRESS = {"name": "ingress", "ray_actor_options": {"num_cpus": 0.1, "label_selector": {"pool": "head"}}}
REPLICAS: dict[Role, int] = {"decode": 2, "prefill": 1}
LIMIT_S = 480.0
BODIES: list[dict[str, Any]] = [
    {"prompt": f"The story of number {i} is " + "long and " * 8, "max_tokens": 900, "ignore_eos": True}
    | ({"temperature": 1.0, "seed": i} if i % 2 else {"temperature": 0})
    for i in range(12)
]


@pytest.fixture(scope="module")
def serving(tmp_path_factory) -> Iterator[ChaosCluster]:
    root = tmp_path_factory.mktemp("chaos")
    sizes = {"num_hidden_layers": 12, "max_position_embeddings": 2048}  # slow enough to be struck in the middle
    folder = make_model(root / "model", "llama", tokenizer=True, **sizes)
    pools = {
        role: {"num_replicas": REPLICAS[role], "num_cpus": 0.4, "label_selector": {"pool": role}} for role in REPLICAS
    }
    model = {
        "name": MODEL,
        "model": str(folder),
        "engine": {
            "device": "cpu",
            "dtype": "float32",
            "num_threads": 1,
            "num_gpu_blocks_override": 2048,
            "tensor_parallel_size": 2,
        },
        **pools,
        "handoff": {"transport": "tcp", "policy": "always"},
    }
    serving = ChaosCluster([HEAD, *[NODES["decode"]] * 2, NODES["prefill"]])
    try:
        serving.put({"models": [model], "ingress": {"store": f"sqlite://{root / 'store.db'}"}}, [INGRESS])
        serving.wait_until_running(REPLICAS)
        yield serving
    finally:
        (root / "ray.log").write_text("\n".join(serving.cluster.log_lines()))
        serving.stop()


@pytest.fixture(scope="module")
def expected(serving) -> list[str]:
    clients = clients_of("nothing")
    asyncio.run(read_all(clients, lambda: serving.url, LIMIT_S))
    assert {client.connections for client in clients} == {1}
    assert len({client.text for client in clients}) == len(BODIES)
    return [client.text for client in clients]


def clients_of(fault: str) -> list[ResumingClient]:
    return [ResumingClient(f"{fault} {i}", body) for i, body in enumerate(BODIES)]


def strike(serving: ChaosCluster, fault: str) -> None:
    """Kill something, and return once the cluster is whole again."""
    if fault == "Serve's controller":
        controller = serving.controller()
        kill(controller)
        wait_until(lambda: serving.controller() not in (None, controller), 60)
    elif fault == "HAProxy":
        kill(*(process.pid for process in serving.cluster.processes() if process.name() == "haproxy"))
    elif fault == "the ingress":
        (pid,) = serving.pids("ingress")
        kill(pid)
        wait_until(lambda: serving.pids("ingress") not in ([], [pid]), 60)
    else:
        role: Role = "decode" if "decode" in fault else "prefill"
        replica = serving.busiest(1) if role == "decode" else serving.replicas(role)[0]
        if fault.startswith("rank 1"):
            kill(replica.ranks[1])
        else:
            kill(serving.cluster.node_processes(replica.node)[0].pid)
            serving.cluster.add_node(NODES[role])
        wait_until(lambda: not replica.lives, 60)
        wait_until(lambda: not serving.lists(replica), 60)
    serving.wait_until_running(REPLICAS)


@pytest.mark.parametrize(
    "fault",
    [
        "Serve's controller",
        "HAProxy",
        "the ingress",
        "rank 1 of a decode replica",
        "rank 1 of a prefill replica",
        "the raylet of a decode node",
        "the raylet of a prefill node",
    ],
)
def test_every_client_has_the_same_text_whatever_dies(serving, expected, fault):
    clients = clients_of(fault)
    running: list[int] = []

    def strike_while_they_run() -> None:
        running.append(sum(not client.done for client in clients))
        strike(serving, fault)

    asyncio.run(
        read_all(clients, lambda: serving.url, LIMIT_S, strike_while_they_run, lambda: all(c.text for c in clients))
    )
    assert running == [len(BODIES)]
    assert [client.text for client in clients] == expected
    connected = [client.connections > 1 for client in clients]
    print(f"\n| {fault} | {sum(connected)} of {len(clients)} clients connected again |")
    assert any(connected) == (fault in ("HAProxy", "the ingress"))
    serving.wait_until_idle()
