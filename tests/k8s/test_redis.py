"""What the containers of the component gcs-redis do, and the head that waits for it."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from cluster.cli.lint.manifests import Manifest
from tests.k8s.overlays import OVERLAYS, needs_kustomize, of_kind, ray_groups, ray_service, rendered

(OVERLAY,) = [overlay for overlay in OVERLAYS if overlay.name == "single-gpu"]

pytestmark = needs_kustomize


def redis() -> Manifest:
    (found,) = of_kind("StatefulSet", rendered(OVERLAY))
    (container,) = found["spec"]["template"]["spec"]["containers"]
    return container


def waiter() -> Manifest:
    containers = ray_groups(rendered(OVERLAY))["head"]["template"]["spec"]["initContainers"]
    (container,) = [container for container in containers if container["name"] == "wait-for-redis"]
    return container


def wait(address: str, *, path: Path | None = None, seconds: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the head's waiter. path: a folder with commands that go before the machine's own. seconds: it has waited."""
    environment = {"PATH": f"{path}:{os.environ['PATH']}", "REDIS": address, "SECONDS": str(seconds)}
    command = [*waiter()["command"], *waiter()["args"]]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20)


def command(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_head_goes_on_once_redis_takes_connections(listening):
    assert wait(listening).stdout == ""


def test_head_asks_again_each_second_as_long_as_there_is_no_redis(tmp_path):
    command(tmp_path / "timeout", f"test -e {tmp_path}/slept")
    command(tmp_path / "sleep", f"touch {tmp_path}/slept")
    waited = wait("redis:6379", path=tmp_path)
    assert (waited.returncode, waited.stdout) == (0, "waiting for Redis at redis:6379\n")


def test_head_gives_up_after_five_minutes_and_says_so():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    waited = wait(address, seconds=300)
    assert (waited.returncode, waited.stdout) == (1, f"no Redis at {address} within 300 s\n")


def test_head_waits_for_the_redis_that_it_uses():
    options = ray_service(rendered(OVERLAY))["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert waiter()["env"] == [{"name": "REDIS", "value": options["redisAddress"].removeprefix("redis://")}]


def test_redis_is_ready_within_two_seconds_of_its_first_answer():
    """Only then has the name that the head waits for an address."""
    (service,) = [m for m in of_kind("Service", rendered(OVERLAY)) if m["metadata"]["name"] == "manta-redis"]
    assert service["spec"]["clusterIP"] == "None"
    assert redis()["readinessProbe"]["periodSeconds"] <= 2


def test_password_of_redis_is_in_its_configuration_and_not_on_its_command_line(tmp_path):
    server = tmp_path / "redis-server"
    server.write_text('#!/bin/sh\necho "$@"\ncat\n')
    server.chmod(0o755)
    container = redis()
    (password,) = [entry["name"] for entry in container["env"]]
    done = subprocess.run(
        [*container["command"], *container["args"]],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", password: "secret"},
        capture_output=True,
        text=True,
        timeout=20,
    )
    command_line, configuration = done.stdout.splitlines()
    assert command_line.split()[0] == "-"  # read the configuration from standard input
    assert "secret" not in command_line
    assert configuration == 'requirepass "secret"'


def test_redis_that_hangs_is_started_again_and_one_that_loads_is_not(tmp_path):
    """Any answer is enough to be alive, but only PONG to be ready."""
    container = redis()
    client = tmp_path / "redis-cli"
    for answer, ready in (("PONG", True), ("LOADING Redis is loading the dataset in memory", False)):
        client.write_text(f"#!/bin/sh\necho {answer}\n")
        client.chmod(0o755)
        for probe, healthy in (("livenessProbe", True), ("readinessProbe", ready)):
            command = container[probe]["exec"]["command"]
            done = subprocess.run(command, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=False)
            assert (done.returncode == 0) == healthy
