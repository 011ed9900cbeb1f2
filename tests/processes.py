"""Processes that tests start: they end with the test, whatever happens, and Ctrl-C reaches them."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

outlives_test: set[Any] = set()
"""Process ids, and ZMQ contexts, of what ends with its module although a single test has started it."""


@contextmanager
def started(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """options: of subprocess.Popen. On leaving, the process and all that it has started are killed."""
    import psutil  # not in a CUDA image, where tests/left_behind.py needs this file

    process = subprocess.Popen(command, text=True, preexec_fn=accept_sigint, **options)
    family: list[psutil.Process] = []
    try:
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        for child in family:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def accept_sigint() -> None:
    """In a child: take back what nohup, `&` in a script and many CI runners set, and children inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
