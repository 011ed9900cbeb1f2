"""The Ray node of this replica, as Linux shows it. Independent of Ray."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

TITLE = b"ray::ServeReplica"  # how the titles of the processes of Serve's replicas begin
ESTABLISHED = "01"


class LocalNode:
    """Its raylet is the parent of this process, and of all other replicas."""

    def __init__(self, port: int, proc: Path = Path("/proc")):
        """port: of the HTTP proxy."""
        self._raylet, self._port, self._proc = os.getppid(), port, proc

    def replicas(self) -> set[int]:
        """Return the process ids of all replicas."""
        found = set()
        for folder in self._proc.glob("[0-9]*"):
            try:
                title, stat = (folder / "cmdline").read_bytes(), (folder / "stat").read_text()
            except OSError:  # it has ended
                continue
            if title.startswith(TITLE) and int(stat.rpartition(")")[2].split()[1]) == self._raylet:
                found.add(int(folder.name))
        return found

    def has_clients(self) -> bool:
        """Return whether anyone is connected to the HTTP proxy."""
        return any(port == self._port and state == ESTABLISHED for port, state in self._sockets())

    def end(self) -> None:
        """Kill the raylet. All other processes of Ray end with it, and `ray start --block` too."""
        os.kill(self._raylet, signal.SIGKILL)

    def _sockets(self) -> Iterator[tuple[int, str]]:
        """Yield the local port and the state of each TCP socket."""
        for table in ("tcp", "tcp6"):
            file = self._proc / "net" / table
            for line in file.read_text().splitlines()[1:] if file.exists() else ():
                _, local, _, state, *_ = line.split()
                yield int(local.rpartition(":")[2], 16), state
