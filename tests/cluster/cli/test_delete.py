"""`manta k8s delete`, against an API server that knows one RayService and its pods."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from cluster.cli.delete import ApiServer, delete
from engine.errors import StartupError

SERVICE = "/apis/ray.io/v1/namespaces/ns/rayservices/manta"
PODS = "/api/v1/namespaces/ns/pods?labelSelector=app.kubernetes.io/part-of%3Dmanta"


class Cluster:
    """Answers by request, one after the other, of which the last stays: a status, or an object."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Any]] = {}
        self.asked: list[str] = []
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                request = f"{self.command} {self.path}"
                cluster.asked.append(request)
                assert self.headers["authorization"] == "Bearer token"
                left = cluster.answers[request]
                found = left.pop(0) if len(left) > 1 else left[0]
                self.send_response(found if isinstance(found, int) else 200)
                self.end_headers()
                self.wfile.write(json.dumps({} if isinstance(found, int) else found).encode())

            do_GET = do_DELETE = answer

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def delete(self) -> list[str]:
        """Return what the command says."""
        said: list[str] = []
        server = ApiServer(f"http://127.0.0.1:{self.http.server_port}", "token")
        delete(server, "ns", "manta", said.append, sleep=lambda _: None)
        return said


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    found = Cluster()
    thread = threading.Thread(target=found.http.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.http.shutdown()
    thread.join()
    found.http.server_close()


def pods(**phases: str) -> dict[str, Any]:
    return {"items": [{"metadata": {"name": name}, "status": {"phase": phase}} for name, phase in phases.items()]}


def test_service_goes_first_and_the_command_ends_when_no_pod_of_it_runs(cluster):
    cluster.answers = {
        f"DELETE {SERVICE}": [{}],
        f"GET {SERVICE}": [{}, {}, 404],  # until KubeRay has taken its finalizer away
        f"GET {PODS}": [
            pods(b="Running", a="Running", clean_up="Succeeded"),
            pods(a="Running"),
            pods(clean_up="Failed"),
        ],
    }
    assert cluster.delete() == [
        "waiting for KubeRay to end RayService manta",
        "waiting for KubeRay to end RayService manta",
        "waiting for pods to end: a, b",
        "waiting for pods to end: a",
    ]
    assert cluster.asked == [f"DELETE {SERVICE}", *3 * [f"GET {SERVICE}"], *3 * [f"GET {PODS}"]]


def test_service_that_is_gone_already_is_no_error(cluster):
    cluster.answers = {f"DELETE {SERVICE}": [404], f"GET {SERVICE}": [404], f"GET {PODS}": [pods()]}
    assert cluster.delete() == ["there is no RayService manta"]


def test_refusal_of_the_api_server_is_told_with_its_status(cluster):
    cluster.answers = {f"DELETE {SERVICE}": [403]}
    with pytest.raises(StartupError, match=f"DELETE {SERVICE} is refused: 403 Forbidden"):
        cluster.delete()


def test_api_server_that_does_not_answer_is_told(cluster):
    server = ApiServer("http://127.0.0.1:9", "token")
    with pytest.raises(StartupError, match=r"the API server does not answer: .*refused"):
        delete(server, "ns", "manta", print)


def test_outside_a_pod_the_command_says_what_to_use(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(StartupError, match="use kubectl delete rayservice"):
        ApiServer.of_pod()
