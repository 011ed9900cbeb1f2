from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from cluster.cli.check.names import check_distributions, check_folder
from cluster.cli.serve import check, configuration
from engine.errors import StartupError

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("file", ["manta.py", "engine.py", "cluster/__init__.py"])
def test_a_start_where_rays_workers_would_import_a_users_file_in_place_of_ours_is_refused(file, tmp_path, monkeypatch):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartupError, match=rf"Ray's workers would import .*{file} instead of Manta's `\w+`"):
        check(configuration("pocket", {}, {"host": "127.0.0.1", "port": 8000}), None)


def test_a_start_without_our_own_manta_is_refused(monkeypatch):
    """Another distribution `manta` has overwritten it."""
    monkeypatch.setitem(sys.modules, "manta", ModuleType("manta"))
    with pytest.raises(StartupError, match=r"`manta/__init__\.py` is not Manta's\. Install manta-serve again"):
        check(configuration("pocket", {}, {"host": "127.0.0.1", "port": 8000}), None)


def test_a_folder_of_data_and_the_checkout_itself_hide_nothing(tmp_path):
    (tmp_path / "cluster").mkdir()
    assert not list(check_folder(tmp_path))
    assert not list(check_folder(ROOT))


def test_another_distribution_with_a_package_of_ours_is_named(tmp_path, monkeypatch):
    info = tmp_path / "cluster-1.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cluster\nVersion: 1.4\n")
    (info / "top_level.txt").write_text("cluster\n")
    assert not list(check_distributions())
    monkeypatch.syspath_prepend(tmp_path)
    (finding,) = check_distributions()
    assert finding.level == "problem" and "`cluster` is also a package of cluster" in finding.message
