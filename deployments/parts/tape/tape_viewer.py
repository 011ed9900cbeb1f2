"""Shows tapes on the console: one at a time, replayed by another process, so that the ingress goes on."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import msgspec

from engine.errors import EngineUnavailable, RequestError

ANSWER_S = 120.0  # the end of a long tape is many steps away
IDLE_S = 300.0  # after which the process ends
MAX_ANSWER_BYTES = 2**24
PROCESS = f"{__package__.partition('deployments')[0]}cluster.lab.tape.viewer_process"
"""The module that replays: a program of its own, since serving imports nothing of cluster/lab/."""


class TapeQuestion(msgspec.Struct, frozen=True):
    """A moment by one of `seconds` from the start and `position`; the start if neither is given."""

    engine: str = ""
    """Empty for the first."""
    seconds: float | None = None
    position: int | None = None


class TapeNotFound(RequestError):
    """No replica has a file with this name."""

    status, type = 404, "not_found_error"

    def __init__(self, name: str):
        Exception.__init__(self, name)
        self.message, self.param = f"there is no tape {name!r} (engine.tape_mib)", None


class TapeViewer:
    def __init__(self) -> None:
        self._name = ""
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._end: asyncio.TimerHandle | None = None

    async def look(self, name: str, question: TapeQuestion, fetch: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return a TapeAnswer in JSON about the tapes with this name. fetch: returns the file of tapes, unless it is
        open; empty for none. Raises TapeNotFound, and EngineUnavailable if there is no answer within ANSWER_S."""
        async with self._lock:
            if self._end is not None:
                self._end.cancel()
            try:
                if name != self._name or self._process is None:
                    await self._open(name, await fetch())
                answer = await asyncio.wait_for(self._ask(msgspec.json.encode(question)), ANSWER_S)
            except BaseException as error:
                self.close()
                if isinstance(error, TimeoutError):
                    raise EngineUnavailable(f"the replay takes more than {ANSWER_S:g} s") from None
                raise
            self._end = asyncio.get_running_loop().call_later(IDLE_S, self.close)
            return answer

    async def _open(self, name: str, data: bytes) -> None:
        self.close()
        if not data:
            raise TapeNotFound(name)
        pipe, path = asyncio.subprocess.PIPE, ""
        try:
            file, path = tempfile.mkstemp(suffix=".tape")
            with os.fdopen(file, "wb") as opened:
                opened.write(data)
            command = [sys.executable, "-m", PROCESS, path]
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, limit=MAX_ANSWER_BYTES
            )
        except OSError as error:  # a disk that is full, or cannot be written
            if path:
                os.unlink(path)
            raise EngineUnavailable(f"the tape cannot be opened: {error}") from error
        self._name, self._path = name, path

    async def _ask(self, question: bytes) -> bytes:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(question + b"\n")
        try:
            answer = await self._process.stdout.readline()
        except ValueError:
            raise EngineUnavailable(f"the moment takes more than {MAX_ANSWER_BYTES} bytes to show") from None
        if not answer:
            raise EngineUnavailable("the process that replays the tape has ended; its log says why")
        return answer

    @asynccontextmanager
    async def served(self) -> AsyncGenerator[None]:
        """Wrap the life of the server: its end ends the process."""
        try:
            yield
        finally:
            process = self._process
            self.close()
            if process is not None:
                await process.wait()

    def close(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            with suppress(FileNotFoundError):
                os.unlink(self._path)
            self._process, self._name = None, ""
