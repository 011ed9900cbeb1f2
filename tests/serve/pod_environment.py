"""The environment that all Ray pods have, for a cluster of this machine."""

from __future__ import annotations

from pathlib import Path

from cluster import haproxy
from cluster.ray_environment import environment
from tests.serve.serve_run import free_port

RAY_ENV = Path(__file__).parents[2] / "k8s" / "base" / "ray.env"


def pod_environment(folder: Path) -> dict[str, str]:
    """HAProxy has ports and files that no other cluster of this machine has. folder: for these; a short path."""
    lines = [line for line in RAY_ENV.read_text().splitlines() if line and not line.startswith("#")]
    pod = {
        name: value for name, _, value in (line.partition("=") for line in lines) if name.startswith(("RAY_", "HF_"))
    }
    proxy = {
        "METRICS_PORT": str(free_port()),
        "STATS_PORT": str(free_port()),
        "CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "SOCKET_PATH": str(folder / "admin.sock"),
        "METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "SERVER_STATE_BASE": str(folder),
        "SERVER_STATE_FILE": str(folder / "server-state"),
    }
    program = {haproxy.BINARY_PATH: environment()[haproxy.BINARY_PATH]}  # the pods' path is the image's
    return pod | program | {f"RAY_SERVE_HAPROXY_{name}": value for name, value in proxy.items()}
