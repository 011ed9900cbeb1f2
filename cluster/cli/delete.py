"""`manta k8s delete`: deletes a RayService from within its namespace, and waits for its pods."""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from engine.errors import StartupError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where Kubernetes mounts a pod's ServiceAccount
LABELS = "app.kubernetes.io/part-of=manta"  # of all Ray pods in k8s/
ENDED = ("Succeeded", "Failed")  # phases of pods without a process
CALL_S, POLL_S = 30.0, 2.0


class ApiServer:
    """Kubernetes' API server."""

    def __init__(self, url: str, token: str, certificate: Path | None = None):
        """certificate: of the authority that has signed the server's; None without TLS."""
        self._url, self._token = url, token
        self._tls = None if certificate is None else ssl.create_default_context(cafile=certificate)

    @classmethod
    def of_pod(cls) -> ApiServer:
        """Return the server of the cluster in which this pod runs. Raises StartupError outside a pod."""
        try:
            host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
            token = (ACCOUNT / "token").read_text()
        except (KeyError, FileNotFoundError):
            raise StartupError(
                "this is not a pod with a ServiceAccount; outside use kubectl delete rayservice"
            ) from None
        return cls(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}", token, ACCOUNT / "ca.crt")

    def call(self, method: str, path: str) -> Any:
        """Return the answer's JSON; None if there is no such object. Raises StartupError."""
        request = Request(self._url + path, method=method, headers={"authorization": f"Bearer {self._token}"})
        try:
            with urlopen(request, timeout=CALL_S, context=self._tls) as answer:
                return json.load(answer)
        except HTTPError as error:
            if error.code == 404:
                return None
            raise StartupError(f"{method} {path} is refused: {error.code} {error.reason}") from None
        except (URLError, TimeoutError) as error:
            raise StartupError(f"the API server does not answer: {error}") from None


def delete(
    server: ApiServer,
    namespace: str,
    name: str,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Delete a RayService, and wait until KubeRay has cleaned up after it and until no pod of it runs any more.

    Only then may all else be deleted: KubeRay's clean-up needs Redis, and draining pods need the network policies.
    Waits forever; its caller has a deadline. Raises StartupError if the API server refuses or does not answer.
    """
    service = f"/apis/ray.io/v1/namespaces/{namespace}/rayservices/{name}"
    if server.call("DELETE", service) is None:
        say(f"there is no RayService {name}")
    while server.call("GET", service) is not None:
        say(f"waiting for KubeRay to end RayService {name}")
        sleep(POLL_S)
    pods = f"/api/v1/namespaces/{namespace}/pods?labelSelector={quote(LABELS)}"
    while running := [pod for pod in server.call("GET", pods)["items"] if pod["status"].get("phase") not in ENDED]:
        say(f"waiting for pods to end: {', '.join(sorted(pod['metadata']['name'] for pod in running))}")
        sleep(POLL_S)
