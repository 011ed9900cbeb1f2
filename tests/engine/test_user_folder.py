from __future__ import annotations

import os
import tempfile

import pytest

from engine.user_folder import (
    can_write,
    given_folder,
    is_own_file,
    is_own_folder,
    new_private_file,
    own_folder,
    private_file,
    private_folder,
    user_folder,
    write_private,
)
from tests.prepared_places import FILES, FOLDERS, IS_ROOT, folder_of_another_user, folder_with_mode


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


@pytest.fixture(params=FOLDERS)
def prepared_folder(request, tmp_path):
    if request.param == "another user's" and not IS_ROOT:
        pytest.skip("only root can give files away")
    FOLDERS[request.param](tmp_path / "place")
    return tmp_path / "place"


@pytest.fixture(params=FILES)
def prepared_file(request, tmp_path):
    if request.param == "another user's" and not IS_ROOT:
        pytest.skip("only root can give files away")
    FILES[request.param](tmp_path / "place")
    return tmp_path / "place"


def test_a_folder_of_our_own_is_made_for_this_user_alone_and_found_again(tmp_path):
    before = os.umask(0)
    try:
        assert own_folder(tmp_path / "a" / "place") == own_folder(tmp_path / "a" / "place") == tmp_path / "a" / "place"
    finally:
        os.umask(before)
    assert (tmp_path / "a" / "place").stat().st_mode & 0o777 == 0o700
    assert is_own_folder(tmp_path / "a" / "place") and not is_own_folder(tmp_path / "b")


def test_a_folder_that_somebody_else_has_prepared_is_refused_in_one_line(prepared_folder):
    before = prepared_folder.lstat()
    with pytest.raises(PermissionError, match="so it is not used") as caught:
        own_folder(prepared_folder)
    assert "\n" not in str(caught.value) and not is_own_folder(prepared_folder)
    assert prepared_folder.lstat() == before and not prepared_folder.with_name("missing").exists()


@pytest.mark.skipif(not IS_ROOT, reason="only root can give files away")
def test_a_folder_that_was_named_may_be_shared_but_not_another_users(tmp_path):
    for mode in (0o777, 0o1777, 0o2775):
        folder_with_mode(mode)(tmp_path / oct(mode))
        assert given_folder(tmp_path / oct(mode)).is_dir()
    folder_of_another_user(tmp_path / "theirs")
    with pytest.raises(PermissionError, match="another user's"):
        given_folder(tmp_path / "theirs")


def test_a_private_file_is_made_for_this_user_alone_and_found_again(tmp_path):
    for _ in range(2):
        private_file(tmp_path / "place")
        assert (tmp_path / "place").stat().st_mode & 0o777 == 0o600 and is_own_file(tmp_path / "place")
        (tmp_path / "place").chmod(0o644)


def test_a_file_that_somebody_else_has_prepared_is_not_opened(prepared_file):
    with pytest.raises(OSError, match="place"):
        private_file(prepared_file)
    with pytest.raises(FileExistsError), open(prepared_file, "xb", opener=new_private_file):
        pass
    assert not is_own_file(prepared_file)
    private = prepared_file.with_name("private")
    assert not prepared_file.with_name("missing").exists()
    assert not private.exists() or (private.read_text(), private.stat().st_mode & 0o777) == ("mine", 0o640)


def test_a_file_that_is_written_as_a_whole_replaces_what_was_prepared_and_writes_through_nothing(prepared_file):
    if prepared_file.is_dir():
        with pytest.raises(IsADirectoryError):
            write_private(prepared_file, b"new")
        return
    write_private(prepared_file, b"new")
    assert is_own_file(prepared_file) and prepared_file.read_bytes() == b"new"
    assert prepared_file.stat().st_mode & 0o777 == 0o600
    private = prepared_file.with_name("private")
    assert not private.exists() or private.read_text() == "mine"
    assert not prepared_file.with_name("missing").exists()


def test_a_write_that_fails_leaves_nothing(tmp_path):
    (tmp_path / "place").mkdir()
    with pytest.raises(IsADirectoryError):
        write_private(tmp_path / "place", b"new")
    assert [file.name for file in tmp_path.iterdir() if file.name != "tmp"] == ["place"]
