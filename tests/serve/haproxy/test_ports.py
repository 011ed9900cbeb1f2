"""Strangers at every port of a running server: nothing that they send is done, they are counted, and requests go on.

On one machine as `manta serve` starts it, and on two nodes with addresses that other machines reach.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import httpx
import msgspec
import psutil
import pytest
import zmq

from engine.kv_transfer.transport import tcp
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import Add
from engine.wire.sampling_params import SamplingParams
from tests.models import make_model
from tests.serve.fake_cluster import FakeCluster
from tests.serve.haproxy.clients import ALICE
from tests.serve.serve_run import ServeRun, wait_until

pytestmark = pytest.mark.serve

OURS = ("ray::RankActor", "ray::ServeReplica")  # processes in which sockets of ours are
SERVE_GRPC = "::"  # where Serve's own server between deployments listens, always (docs/security.md)
NODES = [{"num_cpus": 1}, {"num_cpus": 1}, {"num_cpus": 1}]  # a replica fits a node once
TWO_POOLS = {
    "engine": {"num_threads": 1, "num_gpu_blocks_override": 64, "tensor_parallel_size": 2},
    "decode": {"num_cpus": 0.3},
    "prefill": {"num_cpus": 0.3},
    "handoff": {"policy": "always", "transport": "tcp"},
}
SOCKETS = {"commands", "handoffs", "kv_worker_commands", "kv_worker_answers", "kv_tcp", "engine_notices"}  # of replicas


@dataclass
class Serving:
    server: ServeRun
    processes: list[psutil.Process]
    is_one_machine: bool

    def listening(self) -> set[tuple[str, int]]:
        """(address, port) of sockets in processes of ours."""
        found = set()
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                if " ".join(process.cmdline()).startswith(OURS):
                    found |= {c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        return {(address.ip.removeprefix("::ffff:"), address.port) for address in found}

    def ask(self) -> str:
        body = {"model": "apart", "prompt": "The quick brown", "max_tokens": 5, "temperature": 0}
        answer = httpx.post(f"{self.server.url}/v1/completions", json=body, headers=ALICE, timeout=60)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def refused(self, who: str) -> set[str]:
        """Sockets of replicas (`engine`) or ingresses that have turned somebody away."""
        lines = httpx.get(f"{self.server.url}/metrics", headers=ALICE, timeout=30).text.splitlines()
        pattern = re.compile(rf'manta_{who}_refused_messages_total{{.*reason="unauthenticated",socket="(\w+)"}}')
        return {found[1] for line in lines if (found := pattern.match(line))}


@pytest.fixture(scope="module", params=["one machine", pytest.param("two nodes", marks=pytest.mark.slow)])
def serving(request, tmp_path_factory) -> Iterator[Serving]:
    if request.param == "one machine":
        server = request.getfixturevalue("server")
        yield Serving(server, server.processes(), True)
        return
    folder = tmp_path_factory.mktemp("model")
    model = make_model(folder, "llama", tokenizer=True)
    cluster = FakeCluster(NODES)
    server = ServeRun(
        folder, {"models": [{"name": "apart", "model": str(model), **TWO_POOLS}]}, address=cluster.address
    )
    try:
        server.wait_until_healthy(replicas=2)
        yield Serving(server, server.processes() + cluster.processes(), False)
    finally:
        (folder / "serve.log").write_text("".join(server.log))
        server.stop()
        cluster.stop()


def forge(address: str, port: int, reply_to: str, context: zmq.Context) -> None:
    """A raw byte, a ZMQ message, a request of which the tokens go to us, and a read of KV."""
    url = f"tcp://{f'[{address}]' if ':' in address else address}:{port}"
    request = GenerateRequest(request_id="forged", prompt=[5], params=SamplingParams(max_tokens=3), reply_to=reply_to)
    for message in (b"\xc1", msgspec.msgpack.encode(Add(request))):
        stranger = context.socket(zmq.PUSH)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.IPV6, ":" in address)
        stranger.connect(url)
        stranger.setsockopt(zmq.SNDTIMEO, 5000)
        with suppress(zmq.Again):  # the port may have been open for a moment only, as Ray's dashboard started
            stranger.send(message)
    read = tcp.RESPONSE.pack(bytes(32), bytes(32)) + tcp.REQUEST.pack(tcp.MAGIC, 1, 0, 1, 0, 1, 0) + bytes(4)
    for data in (b"\xc1", read):
        with suppress(OSError), socket.create_connection((address, port), timeout=10) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while got := connection.recv(65536):
                answer += got
            assert len(answer) < 1000, "more than a refusal"


def test_on_one_machine_everything_listens_on_loopback_only(serving):
    if serving.is_one_machine:
        assert {address for address, _ in serving.listening()} - {SERVE_GRPC} == {"127.0.0.1"}


def test_a_ray_that_takes_commands_of_anybody_is_told_of_where_others_reach_it(serving):
    assert ("without authentication" in "".join(serving.server.log)) is not serving.is_one_machine


def test_strangers_at_every_port_are_turned_away_and_counted_and_requests_go_on(serving):
    expected = serving.ask()
    logged = len(serving.server.log)
    with zmq.Context() as context:
        inbox = context.socket(zmq.PULL)
        reply_to = f"tcp://127.0.0.1:{inbox.bind_to_random_port('tcp://127.0.0.1')}"
        ports = serving.listening()
        assert len(ports) > len(SOCKETS)
        for address, port in ports:
            forge(address, port, reply_to, context)
        wait_until(lambda: serving.refused("engine") >= SOCKETS, timeout_s=20)
        wait_until(lambda: serving.refused("ingress") >= {"tokens", "engine_updates"}, timeout_s=20)
        assert serving.ask() == expected
        assert not inbox.poll(0), "tokens of a forged request"
        context.destroy(linger=0)
    assert "replica exits" not in "".join(serving.server.log[logged:])
