"""What the engines of a replica leave of their tapes in shared memory. Independent of Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from deployments.parts.tape.questions import KeptTape
from engine.config import EngineConfig

if TYPE_CHECKING:
    from engine.parts.tape.kept_tapes import KeptTapes

logger = logging.getLogger(__name__)

KEEP_S = 5.0  # at most, before the replica ends


class LeftTapes:
    def __init__(self, config: EngineConfig, engine_ids: Sequence[str]):
        self._config, self._engine_ids = config, engine_ids

    @property
    def _kept(self) -> KeptTapes:
        from engine.parts.tape.kept_tapes import KeptTapes  # replicas start without them

        return KeptTapes.of(self._config)

    async def keep(self, reason: str) -> None:
        """Write the tapes to files, because the engines have ended or hang for this reason (docs/replay.md)."""
        if not self._config.tape_mib:
            return
        from engine.parts.tape.shared_copy import keep_copies_of, shared_root  # replicas start without it

        keeping = asyncio.to_thread(keep_copies_of, self._engine_ids, reason, shared_root())
        try:
            await asyncio.wait_for(keeping, KEEP_S)
        except TimeoutError:
            logger.error("the tapes of %s cannot be kept within %g s", ", ".join(self._engine_ids), KEEP_S)

    async def write(self, tapes: Sequence[bytes], reason: str) -> None:
        """Write these tapes of the living engines to files, because first tokens are late."""
        if tapes:
            await asyncio.to_thread(self._write, tapes, reason)

    def _write(self, tapes: Sequence[bytes], reason: str) -> None:
        from engine.parts.tape.engine_tape import EngineTape

        kept = self._kept
        for data in tapes:
            tape = msgspec.structs.replace(msgspec.msgpack.decode(data, type=EngineTape), cause="late", reason=reason)
            logger.warning("%s: the tape is in %s", reason, kept.keep(tape))

    async def files(self) -> list[KeptTape]:
        """Return the files of kept tapes on this machine."""
        return await asyncio.to_thread(self._files)

    def _files(self) -> list[KeptTape]:
        from engine.parts.tape.kept_tapes import engine_of, file_name

        found, own = [], {_deployment(file_name(each)) for each in self._engine_ids}
        for file in self._kept.files:
            with suppress(FileNotFoundError):  # a newer tape takes its place
                size, written_at = file.stat().st_size, file.stat().st_mtime
                found.append(KeptTape(file.name, size, written_at, own=_deployment(engine_of(file.name)) in own))
        return found

    async def read(self, name: str) -> bytes:
        """Return the content of such a file; empty if there is none with this name."""
        for file in self._kept.files:
            with suppress(FileNotFoundError):
                if file.name == name:
                    return await asyncio.to_thread(file.read_bytes)
        return b""

    def remove(self) -> None:
        """Remove them, because the engines end as they should."""
        if not self._config.tape_mib:
            return
        from engine.parts.tape.shared_copy import remove_copies_of, shared_root

        remove_copies_of(self._engine_ids, shared_root())


def _deployment(engine_id: str) -> str:
    """Return the name of an engine's deployment, with which its id begins."""
    return engine_id.rpartition("-")[0]
