"""The tables of docs/security.md: what reads files that come from elsewhere, and all files that a server writes."""

from __future__ import annotations

import ast
import asyncio
import faulthandler
import io
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from deployments.openai.batches.files import Files
from deployments.storage.key_value import StoreUnavailable
from deployments.storage.memory import MemoryStore
from deployments.storage.sqlite import BESIDE, SqliteStore
from engine.black_box import BlackBox
from engine.config import EngineConfig
from engine.errors import ConfigError, StartupError
from engine.kv_offload.disk import DiskFolder
from engine.kv_offload.sealing import Sealer
from engine.parts.tape.engine_tape import EngineTape
from engine.parts.tape.kept_tapes import KeptTapes
from engine.parts.tape.shared_copy import SharedCopy, keep_copies_of, keep_orphans
from engine.user_folder import is_own_file
from tests.prepared_places import (
    FOLDERS,
    folder_of_another_user,
    hard_link_to_an_own_file,
    link_to_an_own_file,
    link_to_an_own_folder,
)

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
SOURCES = ("engine", "cluster", "deployments", "placement", "manta")

# -- finding -----------------------------------------------------------------------------------------------

MODULES = {
    "cloudpickle", "ctypes", "dill", "jinja2", "joblib", "marshal", "pickle", "runpy", "shelve", "tarfile", "xml",
    "zipfile",
}  # fmt: skip
"""Whose use can run, or write, what a file says."""
CALLS = {
    "CDLL", "create_subprocess_exec", "create_subprocess_shell", "execv", "execve", "extractall",
    "from_pretrained", "import_module", "Popen", "system", "unpack_archive", "unsafe_load", "__import__",
}  # fmt: skip
LOADERS = {"torch.load", "np.load", "numpy.load", "yaml.load", "yaml.full_load", "joblib.load", "torch.jit.load"}
WRITES = {
    "FileHandler", "NamedTemporaryFile", "RotatingFileHandler", "TemporaryDirectory", "TemporaryFile", "copyfile",
    "copytree", "makedirs", "memfd_create", "mkdir", "mkdtemp", "mkfifo", "mkstemp", "new_private_file", "own_folder",
    "given_folder", "private_file", "symlink_to", "write_bytes", "write_private", "write_text",
}  # fmt: skip
COMMANDS = ("cluster/cli/", "cluster/terminal/", "cluster/lab/", "cluster/distribution.py")
"""Commands that a person runs and that write where the person says; `manta serve` has a row."""


def name_of(called: ast.AST) -> str:
    """Return the dotted name of what is called; what stands before it, such as another call, is left out."""
    names = []
    while isinstance(called, ast.Attribute):
        names.append(called.attr)
        called = called.value
    return ".".join([called.id if isinstance(called, ast.Name) else "", *reversed(names)])


def is_true(value: ast.AST) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


def runs(node: ast.AST) -> bool:
    """Whether a piece of source could run what a file says."""
    match node:
        case ast.Import(names=names):
            return any(name.name.split(".")[0] in MODULES for name in names)
        case ast.ImportFrom(module=str(module), level=0):
            return module.split(".")[0] in MODULES
        case ast.Call(func=called, keywords=options):
            name = name_of(called)
            if any(option.arg in ("allow_pickle", "trust_remote_code") and is_true(option.value) for option in options):
                return True
            last = name.rpartition(".")[2]
            return name in LOADERS | {"eval", "exec"} or last in CALLS or name.startswith("subprocess.")
    return False


def writes(node: ast.AST) -> bool:
    """Whether a piece of source makes or opens a file to write."""
    if not isinstance(node, ast.Call):
        return False
    name = name_of(node.func)
    if (last := name.rpartition(".")[2]) != "open":
        return last in WRITES or name in ("os.link", "os.symlink", "sqlite3.connect")
    given = [*node.args[:2], *(option.value for option in node.keywords)]
    modes = [part.value for part in given if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return name == "os.open" or any(set(mode) <= set("rwaxbt+") and set(mode) & set("wax+") for mode in modes)


@cache
def pieces() -> dict[str, list[ast.AST]]:
    """The imports and calls of each source file."""
    files = [file for folder in SOURCES for file in (ROOT / folder).rglob("*.py")]
    kinds = ast.Import, ast.ImportFrom, ast.Call
    return {
        str(file.relative_to(ROOT)): [
            node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, kinds)
        ]
        for file in files
    }


def files_with(found: Callable[[ast.AST], bool]) -> set[str]:
    return {file for file, nodes in pieces().items() if any(map(found, nodes))}


def table(title: str) -> list[list[str]]:
    """The rows of the table in a section of the page."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def named(cell: str) -> set[str]:
    return {part for part in cell.split("`") if part.endswith(".py")}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", True),
        ("from xml.etree import ElementTree", True),
        ("torch.load(path)", True),
        ("x = eval(text)", True),
        ("subprocess.run(text, shell=True)", True),
        ("AutoModel.from_pretrained(path)", True),
        ("f(trust_remote_code=True)", True),
        ("yaml.safe_load(text)", False),
        ("model.eval()", False),
        ("json.load(file)", False),
    ],
)
def test_what_could_run_a_file_is_seen(source, found):
    assert any(map(runs, ast.walk(ast.parse(source)))) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("path.write_text(text)", True),
        ("open(path, 'w')", True),
        ("path.open('xb')", True),
        ("open(path, mode='a')", True),
        ("tempfile.mkstemp()", True),
        ("os.open(path, flags)", True),
        ("sqlite3.connect(path)", True),
        ("open(path)", False),
        ("path.open('rb')", False),
        ("path.read_text()", False),
    ],
)
def test_what_writes_a_file_is_seen(source, found):
    assert any(map(writes, ast.walk(ast.parse(source)))) == found


def test_whatever_could_run_a_file_is_in_the_table():
    told = set[str]().union(*(named(row[0]) for row in table("Files that come from elsewhere")))
    found = files_with(runs)
    told.remove("engine/runner/graphs/torch_compile.py")  # what torch does is not in our source
    assert found - told == set(), "files of source that are not in the table"
    assert told == found, "rows of files that are gone, or do nothing of the kind"


def test_whatever_writes_a_file_is_in_the_table():
    told = set[str]().union(*(named(row[4]) for row in table("Files that a server writes")))
    found = {file for file in files_with(writes) if file in told or not file.startswith(COMMANDS)}
    readers = {"engine/distributed/tp_group.py", "deployments/ray_compat.py"}
    assert found - told - readers == set(), "files of source that are not in the table"
    assert told == found - readers, "rows of files that are gone, or write nothing"


# -- running -----------------------------------------------------------------------------------------------


def kept_tapes(root: Path) -> None:
    KeptTapes(root, 3).keep(TAPE)


def shared_copy(root: Path) -> None:
    copy = SharedCopy(TAPE, root, KeptTapes(root, 3))
    copy.begin(bytes(4096), 0.0, 1)
    if not copy.is_open:
        raise OSError("a line of the log says why, and the engine goes on without a copy")


def batches(root: Path) -> None:
    asyncio.run(Files(root, MemoryStore(2**20)).upload(io.BytesIO(b"a prompt"), None, "name", 60))


def sqlite(root: Path) -> None:
    async def write() -> None:
        store = SqliteStore(str(root / "store.sqlite"), 2**20)
        await store.set("key", b"value", 60)
        await store.close()

    asyncio.run(write())


def disk(root: Path) -> None:
    found = DiskFolder(root, "scope", Sealer(bytes(32), "scope"))
    try:
        found.write(bytes(16), memoryview(b"kv"))
    finally:
        found.close()


def black_box(root: Path) -> None:
    box = BlackBox()
    box.open(root / "rank.0")
    faulthandler.enable()  # as before; its file stays


TAPE = EngineTape(engine_id="e", version="", wall_s=0.0, role="", segments=[])
WRITERS = {
    "`$TMPDIR/manta-tapes-UID`, or `engine.tape_dir`": kept_tapes,
    "`/dev/shm/manta-tapes-UID`": shared_copy,
    "`/dev/shm/manta-engines-UID`": black_box,
    "`ingress.batch_dir`": batches,
    "a SQLite file of `ingress.store`": sqlite,
    "`engine.kv_offloading_dir`": disk,
}
"""What holds names of keys, costs, prompts, answers or KV, by the row of the table."""


@pytest.fixture
def shared_place() -> Iterator[Path]:
    """A folder to which all users of the machine can write, as /tmp."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o1777)
        yield Path(made)


@pytest.mark.parametrize("row", WRITERS)
def test_what_holds_names_costs_or_texts_is_for_this_user_alone(row, shared_place):
    (modes,) = [told[1] for told in table("Files that a server writes") if told[0] == row]
    before = os.umask(0)
    try:
        WRITERS[row](shared_place / "place")
    finally:
        os.umask(before)
    found = [shared_place / "place", *(shared_place / "place").rglob("*")]
    assert len(found) > 1
    for path in found:
        status = path.lstat()
        expected = modes.split(", ")[0 if stat.S_ISDIR(status.st_mode) else 1]
        assert (f"{stat.S_IMODE(status.st_mode):04o}", status.st_uid) == (expected, os.geteuid()), path


REFUSALS = (OSError, ConfigError, StartupError)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("row", WRITERS)
def test_nothing_is_written_into_a_folder_of_another_users(row, shared_place):
    folder_of_another_user(shared_place / "place")
    with pytest.raises(REFUSALS, match="another user's") as caught:
        WRITERS[row](shared_place / "place")
    assert "\n" not in str(caught.value) and not [*(shared_place / "place").iterdir()]


@pytest.mark.parametrize("prepared", [link_to_an_own_file, hard_link_to_an_own_file, os.mkfifo])
@pytest.mark.parametrize(("row", "name"), [
    *[("a SQLite file of `ingress.store`", f"store.sqlite{suffix}") for suffix in BESIDE],
])  # fmt: skip
def test_a_file_that_was_prepared_is_replaced_or_refused_and_never_written_through(row, name, prepared, shared_place):
    """All other names are random."""
    (shared_place / "place").mkdir(mode=0o1777)
    prepared(shared_place / "place" / name)
    with suppress(*REFUSALS):
        WRITERS[row](shared_place / "place")
        assert is_own_file(shared_place / "place" / name)
    private = shared_place / "place" / "private"
    assert not private.exists() or (private.read_text(), private.stat().st_mode & 0o777) == ("mine", 0o640)


def test_tapes_and_copies_that_another_user_may_have_made_are_not_looked_at(shared_place, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(shared_place))
    default = KeptTapes.of(EngineConfig())
    link_to_an_own_folder(default.folder)
    (default.folder / "evil.tape").write_bytes(b"tape")
    assert default.files == []
    os.mkfifo(default.folder / "head")  # opening it would wait for ever
    keep_orphans(default.folder)
    keep_copies_of(["e"], "a reason", default.folder)
    with pytest.raises(PermissionError, match="it is no folder"):
        default.keep(TAPE)
    default.folder.unlink()
    default.keep(TAPE)
    os.mkfifo(default.folder / "other.tape")
    assert [file.name.partition("-")[0] for file in default.files] == ["asked"]


def write_often(row: str, folder: Path) -> None:
    for number in range(12):  # the first may just fit
        WRITERS[row](folder / f"place{number}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize("options", ["size=16k", "ro"])
@pytest.mark.parametrize("row", WRITERS)
def test_a_disk_that_is_full_or_cannot_be_written_is_said_in_one_line(row, options, tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", options, "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        with pytest.raises((*REFUSALS, StoreUnavailable)) as caught:
            write_often(row, tmp_path)
        assert "\n" not in str(caught.value)
        assert not [*tmp_path.rglob("*.new")], "a part was left"
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_kernels_are_not_read_from_a_folder_that_others_can_write(shared_place):
    from engine.model.ops.cpu import kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel.config, "CACHE_DIR", str(shared_place))
        assert kernel.cache_folder("digest") == str(shared_place / "digest")
        assert (shared_place / "digest").stat().st_mode & 0o777 == 0o700
        for prepare in FOLDERS.values():
            folder = shared_place / "prepared"
            prepare(folder)
            assert kernel.cache_folder("prepared") == ""
            shutil.rmtree(folder) if folder.is_dir() and not folder.is_symlink() else folder.unlink()
            shutil.rmtree(shared_place / "private", ignore_errors=True)


def test_compiled_code_is_not_read_from_a_folder_that_others_can_write(shared_place, monkeypatch):
    from engine.runner.graphs.torch_compile import CACHE_DIR, choose_cache

    monkeypatch.setenv(CACHE_DIR, str(shared_place))
    with pytest.raises(StartupError, match="others can write to it"):
        choose_cache()
    monkeypatch.setenv(CACHE_DIR, str(shared_place / "own"))
    choose_cache()
    monkeypatch.delenv(CACHE_DIR)
    monkeypatch.setenv("HOME", str(shared_place / "home"))
    choose_cache()
    assert os.environ[CACHE_DIR] == str(shared_place / "home/.cache/manta/inductor")
