"""What another user of a machine may have made in a shared place."""

from __future__ import annotations

import os

OTHER_USER = 65534
IS_ROOT = os.geteuid() == 0


def folder_of_another_user(place):
    place.mkdir()
    os.chown(place, OTHER_USER, OTHER_USER)


def folder_with_mode(mode):
    def make(place):
        place.mkdir()
        place.chmod(mode)

    return make


def link_to_an_own_folder(place):
    (private := place.with_name("private")).mkdir(mode=0o700)
    place.symlink_to(private)


def file_of_another_user(place):
    place.write_text("theirs")
    os.chown(place, OTHER_USER, OTHER_USER)


def link_to_an_own_file(place):
    place.symlink_to(make_private(place))


def hard_link_to_an_own_file(place):
    place.hardlink_to(make_private(place))


def make_private(place):
    (private := place.with_name("private")).write_text("mine")
    private.chmod(0o640)
    return private


FOLDERS = {
    "another user's": folder_of_another_user,
    "a link to an own folder": link_to_an_own_folder,
    "a link to nothing": lambda place: place.symlink_to(place.with_name("missing")),
    "a link to itself": lambda place: place.symlink_to(place),
    "a file": lambda place: place.write_text(""),
    "a FIFO": os.mkfifo,
    "one to which all can write": folder_with_mode(0o777),
    "one to which all can write, that is sticky": folder_with_mode(0o1777),
    "one to which a group can write": folder_with_mode(0o770),
    "one that all can read": folder_with_mode(0o755),
}
"""What another user of the machine may have made in a shared place, where this user's folder should be."""
FILES = {
    "another user's": file_of_another_user,
    "a link to an own file": link_to_an_own_file,
    "a hard link to an own file": hard_link_to_an_own_file,
    "a link to nothing": lambda place: place.symlink_to(place.with_name("missing")),
    "a FIFO": os.mkfifo,
    "a folder": lambda place: place.mkdir(),
}
"""The same for a file."""
