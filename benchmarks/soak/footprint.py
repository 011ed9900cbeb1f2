"""What a server holds: its processes with their memory, descriptors and threads, its files, its blocks."""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from benchmarks.soak.visitors import AS_FREE
from tests.scrape import Scrape
from tests.serve.serve_run import ServeRun

RANK = re.compile(r"((?:decode|prefill|pd)-\w+)-\w+/(rank\d+) placement\.rank_actor rank starts pid=(\d+)")
TIERS = "kv"  # folder of KV blocks, whose number is limited
BATCHES = "batches"  # folder of records of batches, which stay for weeks
SERVED = "ray::ServeReplica:manta:"
SHARED_MEMORY = "/dev/shm/"
HELD = ("running", "reserved", "leased")
QUEUES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "manta_ingress_requests_waiting")
MIB = 2**20


@dataclass(frozen=True, slots=True)
class ProcessState:
    """kind: what it is, in the words of `Footprints`. started: by the system's clock."""

    kind: str
    started: float
    rss_mib: float
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """at: seconds on the monotonic clock. processes: by process id. strays: kinds of processes that the server has
    started and no longer has below it, but that live. files: in its folder for temporary files, logs, KV blocks,
    records of batches and kept tapes left out. shared_memory: files that one of its processes had mapped at any time,
    and that exist."""

    at: float
    processes: dict[int, ProcessState]
    strays: list[str]
    files: frozenset[str]
    shared_memory: frozenset[str]

    def of(self, kind: str) -> list[ProcessState]:
        """Return the processes of a kind, the one that lives longest first."""
        return sorted((one for one in self.processes.values() if one.kind == kind), key=lambda one: one.started)

    def pids(self, kind: str) -> list[int]:
        """Return the processes of a kind, the youngest first."""
        found = [(one.started, pid) for pid, one in self.processes.items() if one.kind == kind]
        return [pid for _, pid in sorted(found, reverse=True)]

    def counts(self) -> dict[str, int]:
        """Return how many processes there are of each kind."""
        found: dict[str, int] = defaultdict(int)
        for one in self.processes.values():
            found[one.kind] += 1
        return dict(found)


class Footprints:
    """Looks at a server. Kinds are names of programs, `ray::` titles without the method that runs, names of
    deployments, and `rank0 of decode-NAME`."""

    def __init__(self, server: ServeRun, folder: Path):
        """folder: where the server, and the Ray that it starts, have their temporary files."""
        self._server, self._folder = server, folder
        self._seen: dict[psutil.Process, str] = {}
        self._mapped: set[str] = set()
        self._ranks: dict[int, str] = {}
        self._lines = 0

    def look(self) -> Footprint:
        self._read_log()
        processes: dict[int, ProcessState] = {}
        for process in self._server.processes():
            try:
                state = self._state(process)
                self._mapped |= _shared_memory(process.pid)
            except (psutil.Error, OSError):  # it has just ended
                continue
            processes[process.pid] = state
            self._seen[process] = state.kind
        strays = [kind for process, kind in self._seen.items() if process.pid not in processes and _lives(process)]
        bounded = {"logs", TIERS, BATCHES, f"manta-tapes-{os.getuid()}"}
        inside = (path for path in self._folder.rglob("*") if not bounded & set(path.parts))
        files = frozenset(str(path.relative_to(self._folder)) for path in inside if not path.is_dir())
        exist = frozenset(name for name in self._mapped if Path(name).exists())
        return Footprint(time.monotonic(), processes, strays, files, exist)

    def held(self) -> float:
        """Return how many blocks and requests the engines and ingresses hold for anybody. Raises httpx.HTTPError."""
        scrape = self._scrape()
        return sum(scrape.sum("manta_kv_blocks", state=state) for state in HELD) + sum(map(scrape.sum, QUEUES))

    def engines(self) -> float:
        """Return how many decode replicas an ingress could ask. Raises httpx.HTTPError."""
        return self._scrape().sum("manta_up")

    def _scrape(self) -> Scrape:
        answer = httpx.get(f"{self._server.url}/metrics", timeout=30, headers=AS_FREE)
        return Scrape(answer.raise_for_status().text)

    def _read_log(self) -> None:
        lines = self._server.log
        for line in lines[self._lines :]:
            if found := RANK.search(line):
                self._ranks[int(found[3])] = f"{found[2]} of {found[1]}"
        self._lines = len(lines)

    def _state(self, process: psutil.Process) -> ProcessState:
        with process.oneshot():
            if process.status() == psutil.STATUS_ZOMBIE:
                return ProcessState("zombie", process.create_time(), 0.0, 0, 0)
            kind = self._ranks.get(process.pid) or _kind(process.name(), process.cmdline())
            memory = process.memory_info().rss / MIB
            return ProcessState(kind, process.create_time(), memory, process.num_fds(), process.num_threads())


def _kind(name: str, command: list[str]) -> str:
    title = " ".join(command)
    if title.startswith(SERVED):
        return re.split(r"[.\s]", title.removeprefix(SERVED))[0]
    if title.startswith("ray::"):
        return re.split(r"[.\s]", title)[0]
    scripts = [Path(part) for part in command if part.endswith(".py")]
    return scripts[0].stem if scripts else name


def _shared_memory(pid: int) -> set[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[5] for line in lines if f" {SHARED_MEMORY}" in line and not line.endswith("(deleted)")}


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
