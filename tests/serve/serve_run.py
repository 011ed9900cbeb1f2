"""A real `serve run`, in a Ray of its own that no other test or user sees."""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import yaml

from cluster.autoscaling.slo import POLICY
from deployments import without_pandas
from tests.serve.installed import Installed

STARTUP_S = 280.0  # less than the timeout of a test
SERVE_RUN = [str(Path(sys.executable).with_name("serve")), "run"]
MANTA_SERVE = [str(Path(sys.executable).with_name("manta")), "serve"]


class Program(ABC):
    """Started by the constructor, and stopped at the end of a `with`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @abstractmethod
    def stop(self) -> None: ...


RANK = "ray::RankActor"  # how the titles of ranks' processes begin


class ServeRun(Program):
    """Its log lines can be awaited, and a `with` leaves them in serve.log. `stop` leaves no process behind."""

    def __init__(
        self,
        folder: Path,
        args: dict[str, Any],
        *,
        address: str = "local",
        deployments: list[dict[str, Any]] | None = None,
        environment: dict[str, str] | None = None,
        manta: bool = False,
        installed: Installed | None = None,
        policy: str | None = POLICY,
        http_options: dict[str, str] | None = None,
    ):
        """args: of cluster.app.build. address: of a running Ray. deployments: overrides in the configuration.
        environment: further variables of the process, which Ray reads. manta: by `manta serve` in place of `serve run`.
        installed: the same, of a wheel, in its user's folder.
        policy: what scales; None leaves it out of the configuration. http_options: beside host and port.
        """
        self._folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._http_options = {"host": "127.0.0.1", "port": self.port, **(http_options or {})}
        self.log: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._ray_folder = tempfile.TemporaryDirectory(prefix="manta", dir="/tmp")  # socket paths must be short
        config = folder / "serve_config.yaml"
        self._batch_dir = str(folder / "batches")
        self._args, self._deployments, self._policy = args, deployments or [], policy
        config.write_text(yaml.safe_dump(self._config(args)))
        command, given = MANTA_SERVE if manta else SERVE_RUN, os.environ
        if installed is not None:
            command, given = [str(installed.manta), "serve"], installed.environment
            wheels_name = {"RAY_preload_python_modules": f"manta.{without_pandas.__name__}"}
            environment = wheels_name | dict(environment or {})
        self._process = subprocess.Popen(
            [*command, "--address", address, str(config)],
            cwd=Path(__file__).parents[2] if installed is None else installed.user_folder,
            env=ray_environment(self._ray_folder.name, given) | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # background jobs ignore it
        )
        threading.Thread(target=self._read, daemon=True).start()

    def wait_for_line(self, part: str, timeout_s: float = STARTUP_S) -> str:
        """The first line not yet looked at that contains `part`."""
        deadline = time.monotonic() + timeout_s
        while (line := self._lines.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
            if part in line:
                return line
        raise AssertionError(f"serve run ended without {part!r}:\n" + "".join(self.log))

    def worker_lines(self) -> list[str]:
        """Whole lines in the log files of Ray's workers. Ray may tear a line in two when it copies it into `log`."""
        files = Path(self._ray_folder.name).glob("ray/session_latest/logs/worker-*")
        lines = [line for file in files for line in file.read_text(errors="replace").splitlines(keepends=True)]
        return [line for line in lines if line.endswith("\n")]

    def wait_until_healthy(self, replicas: int = 1) -> None:
        """replicas: of all models together, so many must have started."""
        for _ in range(replicas):
            self.wait_for_line("replica ready")
        wait_until(lambda: httpx.get(f"{self.url}/health", timeout=10).status_code == 200)

    def put(self, args: dict[str, Any]) -> None:
        """Change the application, as `serve deploy` does; returns once Serve has taken the configuration."""
        self._args = args
        httpx.put(self._applications, json=self._config(args), timeout=60).raise_for_status()

    def scale(self, deployment: str, num_replicas: int) -> None:
        """Change one deployment's number of replicas, and nothing else of the application."""
        others = [each for each in self._deployments if each["name"] != deployment]
        self._deployments = [*others, {"name": deployment, "num_replicas": num_replicas}]
        self.put(self._args)

    def status(self) -> str:
        """The application's status, as Serve reports it."""
        status: str = httpx.get(self._applications, timeout=30).json()["applications"]["manta"]["status"]
        return status

    def dashboard(self) -> str:
        """The address of Ray's dashboard, which may start after the application."""
        wait_until(lambda: self._dashboard() is not None)
        return str(self._dashboard())

    def _dashboard(self) -> str | None:
        named = re.search(r"dashboard (?:is up )?at .*?(http://[\d.]+:\d+)", "".join(self.log))
        return named and named[1]

    @property
    def _applications(self) -> str:
        return f"{self.dashboard()}/api/serve/applications/"

    def wait(self, timeout_s: float) -> int:
        """The exit status."""
        return self._process.wait(timeout_s)

    def interrupt(self) -> None:
        """Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.send_signal(signal.SIGTERM)

    def processes(self) -> list[psutil.Process]:
        parent = psutil.Process(self._process.pid)
        return [parent, *parent.children(recursive=True)]

    def process_of(self, engine: str, rank: int | None = None) -> psutil.Process:
        """The process of a rank of an engine, or of its control actor."""
        if rank is None:
            pattern, lines = rf"pid=(\d+)\).*\b{engine}\b.*replica ready", self.log
        else:
            pattern, lines = rf"{engine}/rank{rank}\b.*rank starts pid=(\d+)", self.worker_lines()
        return psutil.Process(next(int(found[1]) for line in lines if (found := re.search(pattern, line))))

    def __exit__(self, *error: object) -> None:
        (self._folder / "serve.log").write_text("".join(self.log))
        self.stop()

    def stop(self) -> None:
        """At once; an end in order takes Serve 10 s, and is what some tests are about."""
        if self._process.poll() is None:
            kill_all(self.processes())
        self._ray_folder.cleanup()

    def _config(self, args: dict[str, Any]) -> dict[str, Any]:
        args = {**args, "ingress": {"batch_dir": self._batch_dir, **args.get("ingress", {})}}
        app = {
            "name": "manta",
            "route_prefix": "/",
            "import_path": "manta:build",
            "args": args,
        }
        if self._policy is not None:
            app["autoscaling_policy"] = {"policy_function": self._policy}
        return {
            "proxy_location": "HeadOnly",  # nodes of a FakeCluster would all want the same port
            "http_options": self._http_options,
            "applications": [{**app, "deployments": self._deployments}],
        }

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.log.append(line)
            self._lines.put(line)
        self._lines.put(None)


def kill_all(processes: list[psutil.Process]) -> None:
    """SIGKILL, parents first, since they might start others; returns when all have ended."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive


def ray_environment(folder: str, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a process whose Ray nobody else sees. folder: for its files; a short path."""
    ours = {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # as `manta serve` does: other tests keep the machine busy
        "RAY_TMPDIR": folder,
        "RAY_worker_niceness": "0",  # else what computes beside it lets a cluster wait
        "RAY_preload_python_modules": without_pandas.__name__,
    }
    return {**{k: v for k, v in given.items() if not k.startswith("RAY_")}, **ours}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.05)  # the condition lives in another process, which cannot wake us
