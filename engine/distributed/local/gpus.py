"""Collectives of ranks on GPUs of one machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial

from engine.distributed.local.agreement import all_can
from engine.distributed.local.symmetric_memory import SIZES, SymmetricMemory, open_symmetric_memory
from engine.distributed.process_group import COLLECTIVE_TIMEOUT_S, Collectives, ProcessGroup
from engine.distributed.tp_group import ConnectedGroup
from engine.errors import StartupError

POLL_INTERVAL_S = 0.01


def connect(group: ConnectedGroup, pids: list[int], plain: Callable[[], ProcessGroup]) -> Collectives:
    """Return collectives over symmetric memory if it works on all ranks, else what `plain` returns. Every rank has to
    call this. Raises StartupError."""
    nccl = plain()
    if group.size not in SIZES:
        return nccl
    store, name = group.store("symmetric memory"), f"manta {group.address}"
    return share_if_all_can(group, nccl, partial(open_symmetric_memory, nccl, store, group.rank, group.size, name))


def share_if_all_can(
    group: ConnectedGroup, plain: Collectives, open_shared: Callable[[], SymmetricMemory]
) -> Collectives:
    """Return what `open_shared` opens if it works on all ranks, else `plain`."""
    shared: SymmetricMemory | None = None
    try:
        shared, problem = open_shared(), ""
    except Exception as error:  # noqa: BLE001 - any error that torch raises where there is none
        problem = str(error)
    # agree that all ranks have mapped it before running kernels, which wait on the device for ranks that do not
    if all_can(group, problem) and shared is not None and all_can(group, check_in_thread(group, shared)):
        return shared
    if shared is not None:
        shared.release()
    return plain


def check_in_thread(group: ConnectedGroup, shared: SymmetricMemory) -> str:
    """Return the result of `shared.check`. Raises StartupError after COLLECTIVE_TIMEOUT_S, or if another rank fails
    meanwhile. The check runs in a thread that is never joined, since its wait cannot be ended."""
    found: Future[str] = Future()

    def check() -> None:
        try:
            found.set_result(shared.check(group.rank))
        except BaseException as error:  # noqa: BLE001 - raised by result()
            found.set_exception(error)

    threading.Thread(target=check, name="check sums", daemon=True).start()
    deadline = time.monotonic() + COLLECTIVE_TIMEOUT_S
    while not wait([found], POLL_INTERVAL_S).done:
        group.check_others()
        if time.monotonic() > deadline:
            limit = f"had not ended after {COLLECTIVE_TIMEOUT_S:.0f} s; set disable_custom_all_reduce to avoid it"
            raise StartupError(f"a sum over memory that the GPUs share {limit}")
    return found.result()
