"""The wheel: all below one name, and nothing of it changed but that."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[3]
TOOLS = ROOT / "tools" / "wheel"
below_one_name = runpy.run_path(str(TOOLS / "build_backend.py"))["below_one_name"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from engine import LLM", "from manta.engine import LLM"),
        ("def f():\n    from cluster.cli.chat import (\n", "def f():\n    from manta.cluster.cli.chat import (\n"),
        (
            "from engineering import x\nfrom ray.cluster import y\n",
            "from engineering import x\nfrom ray.cluster import y\n",
        ),
        ("from engine to client\n", "from engine to client\n"),
        ("`python -m engine.model.ops.cpu`", "`python -m manta.engine.model.ops.cpu`"),
        ("import engines, os", "import engines, os"),
    ],
)
def test_our_packages_are_prefixed_where_they_are_imported_and_nothing_else_is(source, expected):
    assert below_one_name(source) == expected


@pytest.mark.parametrize("source", ["import engine", "    import deployments.openai as openai"])
def test_an_import_that_would_bind_another_name_ends_the_build(source):
    with pytest.raises(ValueError, match="write `from"):
        below_one_name(source)


def build(kind: str, tree: Path, out: Path) -> Path:
    """kind: wheel or sdist."""
    program = (
        f"import sys; sys.path.insert(0, 'tools/wheel'); import build_backend; build_backend.build_{kind}({str(out)!r})"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tree, check=True, capture_output=True)
    (file,) = out.iterdir()
    return file


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def imported(source: str) -> set[str]:
    """The outermost packages that a file imports by their full names."""
    nodes = list(ast.walk(ast.parse(source)))
    found = {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return found | {n.module.split(".")[0] for n in nodes if isinstance(n, ast.ImportFrom) and not n.level and n.module}


def test_in_the_wheel_one_name_is_at_the_top_and_no_file_imports_another_of_ours(wheel):
    with ZipFile(wheel) as files:
        assert {name.split("/")[0] for name in files.namelist()} == {"manta", "manta_serve-0.1.0.dist-info"}
        assert files.read("manta_serve-0.1.0.dist-info/top_level.txt").split() == [b"manta"]
        sources = [name for name in files.namelist() if name.endswith(".py")]
        assert "manta/engine/core/scheduler.py" in sources
        for name in sources:
            source = files.read(name).decode()
            assert not imported(source) & {"engine", "placement", "deployments", "cluster"}, name
            ours = ROOT / name.removeprefix("manta/")
            ours = ours if ours.exists() else ROOT / name
            assert source.count("\n") == ours.read_text().count("\n"), name


def test_the_wheel_has_what_its_commands_need_and_name(wheel):
    with ZipFile(wheel) as files:
        names = set(files.namelist())
        entry_points = files.read("manta_serve-0.1.0.dist-info/entry_points.txt").decode()
        (built_from,) = files.read("manta/COMMIT").split()
    assert "manta = manta.__main__:main" in entry_points and "= manta.cluster.haproxy:main" in entry_points
    assert built_from
    needed = ["py.typed", "serve_config.yaml", "serve_config_pd.yaml", "docs/handoff.md", "k8s/README.md"]
    needed += ["k8s/chart/Chart.yaml", "k8s/chart/files/base/rayservice.yaml"]
    needed += ["engine/pocket/model/model.safetensors", "engine/pocket/pirate/adapter_model.safetensors"]
    needed += ["deployments/parts/console/page/index.html"]
    assert not {f"manta/{name}" for name in needed} - names
    assert not [name for name in names if "__pycache__" in name or name.startswith("manta/tests")]


@pytest.mark.slow
def test_a_wheel_of_the_sdist_is_the_wheel_of_the_checkout(wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1750000000")
    (tmp_path / "again").mkdir(), (tmp_path / "sdist").mkdir(), (tmp_path / "theirs").mkdir()
    with tarfile.open(build("sdist", ROOT, tmp_path / "sdist")) as files:
        files.extractall(tmp_path)
    again = build("wheel", ROOT, tmp_path / "again")
    theirs = build("wheel", tmp_path / "manta_serve-0.1.0", tmp_path / "theirs")
    assert theirs.read_bytes() == again.read_bytes()
