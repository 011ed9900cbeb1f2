from __future__ import annotations

import os
import tempfile

import pytest

from engine.user_folder import can_write, private_folder, user_folder


@pytest.fixture(autouse=True)
def tmp(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("HOME", "/dev/null")  # in which not even root can write
    return tmp_path / "tmp"


def test_a_folder_of_a_home_that_can_be_written_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert user_folder("~/.cache/x") == tmp_path / "home" / ".cache" / "x"
    assert can_write(tmp_path / "home")


def test_a_folder_of_a_home_that_cannot_be_written_is_private_below_tmp_and_said_to_be(tmp, caplog):
    found = user_folder("~/.cache/x")
    assert found == tmp / f"manta-{os.getuid()}" / ".cache" / "x"
    assert tmp.joinpath(f"manta-{os.getuid()}").stat().st_mode & 0o777 == 0o700
    assert "~/.cache/x cannot be written" in caplog.text


@pytest.mark.parametrize("path", ["/dev/null/x", "relative/x"])
def test_a_folder_that_was_named_outright_is_that_folder(path):
    assert str(user_folder(path)) == path


def test_a_folder_that_others_can_write_is_not_private(tmp):
    folder = tmp / f"manta-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    assert private_folder() is None
    folder.rmdir()
    folder.symlink_to(tmp)
    assert private_folder() is None
    assert str(user_folder("~/x")) == "/dev/null/x"
