"""Collectives of ranks on CPUs of one machine."""

from __future__ import annotations

from collections.abc import Callable

from engine.devices.device import numba_found
from engine.distributed.local.agreement import all_can
from engine.distributed.process_group import COLLECTIVE_TIMEOUT_S, Collectives
from engine.distributed.tp_group import ConnectedGroup


def connect(group: ConnectedGroup, pids: list[int], plain: Callable[[], Collectives]) -> Collectives:
    """Return collectives over shared memory, or what `plain` returns unless all ranks can share it. pids: process ids
    of all ranks. Every rank has to call this. Raises StartupError."""
    if not numba_found():
        return plain()
    from engine.distributed.local.shared_memory import SharedMemory  # importing it compiles code

    shared, problem, path = None, "", ""
    try:
        if group.rank == 0:
            shared = SharedMemory(0, pids, None, COLLECTIVE_TIMEOUT_S)
            path = shared.path
    except OSError as error:
        problem = str(error)
    path = group.exchange(path)[0]
    try:
        if group.rank and path:
            shared = SharedMemory(group.rank, pids, path, COLLECTIVE_TIMEOUT_S)
    except OSError as error:
        problem = str(error)
    shared_by_all = all_can(group, problem)
    if shared is not None:
        shared.close_file()
    return shared if shared is not None and shared_by_all else plain()
