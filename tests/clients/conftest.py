"""Conversations of well-known clients with the HTTP API, each with a tool call and a stream: `make test-clients`.

They run in virtual environments of the clients' own, since their dependencies do not all go with Ray's (nor with each
other's: those in `openai_2` need version 2 of OpenAI's library), and with the programs and the SDK of `package.json`.
The server is another process, of Manta's environment.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv" / "bin" / "python"


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Address of a server whose model does what it is told (obedient_server.py)."""
    command = [os.environ.get("MANTA_PYTHON", PYTHON), "-m", "tests.clients.obedient_server"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, "the server did not start"
        yield address
    finally:
        process.kill()
        process.wait()
