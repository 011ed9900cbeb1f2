"""Folders and files of the user on a machine that others use too: the one place that decides whether they are safe.

Another user of the machine may have made what is found under a name in a shared folder, such as /tmp or /dev/shm: a
folder of theirs, a link to somewhere else, or a FIFO that nobody writes.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

OTHERS, OTHERS_WRITE = 0o077, 0o022


def user_folder(path: str) -> Path:
    """Return a folder. A folder below `~` that cannot be written is replaced by one below `private_folder`, with a
    warning."""
    expanded = Path(os.path.expanduser(path))  # Path.expanduser would raise where there is no home at all
    if not path.startswith("~/") or can_write(expanded) or (private := private_folder()) is None:
        return expanded
    logger.warning("%s cannot be written, so %s is used, which may be emptied when the machine restarts", path, private)
    return private / path.removeprefix("~/")


def can_write(folder: Path) -> bool:
    """Create a folder if it is missing. Returns whether files can be created in it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def private_folder() -> Path | None:
    """Return this user's folder below /tmp (or `$TMPDIR`); None if another user has made it, or can write to it."""
    with suppress(OSError):
        return own_folder(Path(tempfile.gettempdir(), f"manta-{os.getuid()}"))
    return None


# -- folders -----------------------------------------------------------------------------------------------


def own_folder(folder: Path, *, may_read: bool = False) -> Path:
    """Create a folder that only this user can enter, unless it is there, and return it. Raises PermissionError if it is
    no folder, a link, another user's, or if others can enter it. may_read: whether others may, but may not write."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    check_own_folder(folder, may_read=may_read)
    return folder


def check_own_folder(folder: Path, *, may_read: bool = False) -> None:
    """Raise PermissionError unless a folder is this user's alone, as in own_folder; FileNotFoundError if it is
    missing."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise refused(folder, "it is no folder")
    if found.st_uid != os.geteuid():
        raise refused(folder, "it is another user's")
    if found.st_mode & (OTHERS_WRITE if may_read else OTHERS):
        raise refused(folder, "others can write to it" if may_read else "others can enter it")


def is_own_folder(folder: Path) -> bool:
    """Return whether there is a folder that is this user's alone, as in own_folder."""
    with suppress(OSError):
        check_own_folder(folder)
        return True
    return False


def given_folder(folder: Path) -> Path:
    """Create a folder that somebody has named in the configuration, unless it is there, and return it. Others may be
    able to write to it, as to a volume of Kubernetes. Raises PermissionError if another user but root has made it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid not in (0, os.geteuid()):
        raise refused(folder, "it is another user's")
    return folder


def refused(path: Path, why: str) -> PermissionError:
    return PermissionError(errno.EPERM, f"{why}, so it is not used", str(path))


# -- files -------------------------------------------------------------------------------------------------


def is_own_file(file: Path) -> bool:
    """Return whether a path is a regular file of this user's with this name alone: no link, no FIFO, and no file of
    somebody else's."""
    with suppress(OSError):
        found = file.lstat()
        return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1
    return False


def private_file(file: Path) -> None:
    """Create a file that only this user can read, unless it is there. Raises PermissionError if it is a link, another
    user's, or no regular file. A file that is there is not opened: its end would take the locks of SQLite's."""
    try:
        os.close(new_private_file(file, os.O_WRONLY))
    except FileExistsError:
        if not is_own_file(file):
            raise refused(file, "it is no file of this user's alone") from None
        file.chmod(0o600)


def new_private_file(path: str | Path, flags: int) -> int:
    """Create and open a file that only this user can read: an opener for `open(path, "xb")`."""
    return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)


def write_private(file: Path, data: bytes, suffix: str = ".new") -> None:
    """Write a file that only this user can read. It appears under its name only once it is complete, and replaces what
    is there, also a link. If this fails, raises OSError and leaves no file behind. suffix: of its name until then."""
    temporary = file.with_suffix(f".{secrets.token_hex(4)}{suffix}")
    with open(temporary, "xb", buffering=0, opener=new_private_file) as opened:
        try:
            written = 0
            while written < len(data):  # a nearly full disk may take a part
                written += opened.write(memoryview(data)[written:]) or 0
            os.replace(temporary, file)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
