"""What a server has to itself on its machine: its ports, and the folder of its HAProxy."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from cluster import server_ports
from cluster.ray_environment import own_environment, proxy_threads
from engine.errors import StartupError
from tests.serve.serve_run import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="HAProxy is for Linux only")

hold = server_ports.held_port.__wrapped__
MIN, MAX = "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT", "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT"
METRICS = "RAY_SERVE_HAPROXY_METRICS_PORT"


@pytest.fixture(autouse=True)
def no_ports_of_the_user(monkeypatch) -> None:
    for name in [*server_ports.PORTS, *server_ports.KNOWN_PORTS]:
        monkeypatch.delenv(name, raising=False)


def ports_of(held: socket.socket, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    monkeypatch.setattr(server_ports, "held_port", lambda: held)
    return {name: int(port) for name, port in server_ports.server_ports().items()}


def test_two_servers_of_one_machine_have_no_port_in_common(monkeypatch):
    with closing(hold()) as one, closing(hold()) as other:
        taken: list[int] = []
        for held in (one, other):
            ports = ports_of(held, monkeypatch)
            ranges = [(name, name.replace("MIN", "MAX")) for name in ports if "_MIN_" in name]
            singles = [port for name, port in ports.items() if "_MIN_" not in name and "_MAX_" not in name]
            taken += [held.getsockname()[1], *singles]
            taken += [port for low, high in ranges for port in range(ports[low], ports[high] + 1)]
        assert len({*taken}) == len(taken) == 2 * (5 + 90)


def test_haproxys_metrics_are_where_people_look_unless_somebody_is_there(monkeypatch):
    first = socket.socket()
    with closing(first):
        first.bind(("", 0))
        monkeypatch.setattr(server_ports, "FIRST_PORT", first.getsockname()[1])
        known = server_ports.KNOWN_PORTS[METRICS]
        with socket.create_server(("127.0.0.1", 0)) as listener:
            taken = listener.getsockname()[1]
            monkeypatch.setitem(server_ports.KNOWN_PORTS, METRICS, known._replace(number=taken))
            assert ports_of(first, monkeypatch)[METRICS] == first.getsockname()[1] + known.offset
        assert ports_of(first, monkeypatch)[METRICS] == taken


def test_port_that_the_user_sets_stays(monkeypatch):
    monkeypatch.setenv(METRICS, "5000")
    with closing(hold()) as held:
        assert METRICS not in ports_of(held, monkeypatch)
    assert server_ports.given_ports() == {METRICS: 5000}


def test_server_for_which_no_ports_are_left_does_not_start_with_those_of_others(monkeypatch):
    with closing(hold()) as held:
        monkeypatch.setattr(server_ports, "FIRST_PORT", held.getsockname()[1])
        monkeypatch.setattr(server_ports, "LAST_PORT", held.getsockname()[1] + 1)
        with pytest.raises(StartupError, match="Stop another server on this machine"):
            hold()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    """Prints the folder of its HAProxy, and waits."""
    program = """if True:
        from cluster.server_folder import server_folder
        print(server_folder()["RAY_SERVE_HAPROXY_SERVER_STATE_BASE"], flush=True)
        input()
    """
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.kill()


def removers(folder: Path) -> list[psutil.Process]:
    """Processes that wait to remove a folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("FOLDER") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGKILL])
def test_haproxys_folder_is_of_one_user_and_is_removed_however_the_server_ends(process, number):
    assert process.stdout is not None and process.stdin is not None
    folder = Path(process.stdout.readline().strip())
    assert folder.stat().st_mode & 0o777 == 0o700
    assert removers(folder), "or it is gone at once"
    (folder / "node").mkdir()
    (folder / "node" / "haproxy.cfg").touch()
    if number is None:
        process.stdin.write("\n")
        process.stdin.flush()
    else:
        os.kill(process.pid, number)
    wait_until(lambda: not folder.exists() and not removers(folder))


def test_paths_of_haproxys_sockets_fit_with_what_ray_and_haproxy_add_to_them():
    node_id, temporary = "0" * 56, ".4194304.tmp"
    paths = [path for name, path in own_environment().items() if name.endswith("SOCKET_PATH")]
    assert len(paths) == 2
    for path in paths:
        assert len(os.path.join(os.path.dirname(path), node_id, os.path.basename(path) + temporary)) < 108


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (8, 2), (16, 4), (192, 4)])
def test_haproxy_has_a_thread_for_four_cores_and_never_more_than_rays(cores, threads):
    assert proxy_threads(cores) == threads


def test_a_server_whose_user_has_no_home_that_can_be_written_has_a_token_of_its_own(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "RAY_AUTH_TOKEN" not in own_environment()
    monkeypatch.setenv("HOME", "/dev/null")
    token = own_environment()["RAY_AUTH_TOKEN"]
    assert len(token) == 64
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/run/secrets/token")
    assert "RAY_AUTH_TOKEN" not in own_environment()
