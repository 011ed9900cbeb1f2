"""Tapes of engines that have ended badly, in files on their machine."""

from __future__ import annotations

import os
import secrets
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.parts.tape.engine_tape import EngineTape, tape_with_key
from engine.parts.tape.file import pack_tapes
from engine.user_folder import given_folder, is_own_file, is_own_folder, own_folder, write_private


@dataclass(frozen=True, slots=True)
class KeptTapes:
    folder: Path
    max_files: int
    """Of each cause: the newest stay."""

    @classmethod
    def of(cls, config: EngineConfig) -> KeptTapes:
        return cls(Path(config.tape_dir) if config.tape_dir else default_folder(), config.max_kept_tapes)

    @property
    def files(self) -> list[Path]:
        """Files of this user's in the folder. What others may have put there is none."""
        if self.folder == default_folder() and not is_own_folder(self.folder):
            return []
        return sorted(file for file in self.folder.glob("*.tape") if is_own_file(file))

    def keep(self, tape: EngineTape) -> Path:
        """Write a tape to a file of its own, which only this user can read, and return the file. Its hashes get a key
        that is thrown away. Raises OSError."""
        (own_folder if self.folder == default_folder() else given_folder)(self.folder)
        oldest_first = sorted((file for file in self.files if file.name.startswith(f"{tape.cause}-")), key=_written_at)
        for old in oldest_first[: max(0, len(oldest_first) + 1 - self.max_files)]:
            old.unlink(missing_ok=True)
        name = f"{tape.cause}-{file_name(tape.engine_id)}-{datetime.now(UTC):%Y%m%dT%H%M%S%f}.tape"
        path = self.folder / name
        data = pack_tapes([tape_with_key(msgspec.msgpack.encode(tape), secrets.token_bytes(16))])
        write_private(path, data)
        return path


def default_folder() -> Path:
    """Return the folder of kept tapes if the configuration names none: below /tmp, where others may have made it."""
    return Path(tempfile.gettempdir(), f"manta-tapes-{os.getuid()}")


def _written_at(file: Path) -> float:
    """Return when a file was written, in seconds since 1970; 0 for one that another engine has just removed."""
    with suppress(FileNotFoundError):
        return file.stat().st_mtime
    return 0.0


def engine_of(name: str) -> str:
    """Return the engine, as in the name of a kept tape."""
    return name.partition("-")[2].rpartition("-")[0]


def file_name(engine_id: str) -> str:
    """Return an engine's id as a part of a file's name."""
    return engine_id.replace("/", "-")
