"""What is written about holds while a disk or store hangs."""

from __future__ import annotations

from collections.abc import Callable

from engine.kv_offload import hold_writer
from engine.kv_offload.hold_writer import HoldWriter
from engine.kv_offload.store import Unreachable
from engine.wire.parts.kv_offload import DropHold, SavedHold, SaveHold


class Folder:
    """Holds by name. fails: whether it is out of reach."""

    def __init__(self) -> None:
        self.holds: dict[bytes, SavedHold] = {}
        self.changes = 0
        self.fails = False

    def save_hold(self, name: bytes, hold: SavedHold) -> None:
        self._change()
        self.holds[name] = hold

    def drop_hold(self, name: bytes) -> None:
        self._change()
        self.holds.pop(name, None)

    def _change(self) -> None:
        self.changes += 1
        if self.fails:
            raise Unreachable("no route")


def writer() -> tuple[HoldWriter, Folder, list[Callable[[], None]]]:
    """A writer whose thread hangs: its tasks run when a test runs them."""
    folder, tasks = Folder(), []
    return HoldWriter(folder, tasks.append), folder, tasks  # type: ignore[arg-type]


def saved(name: bytes, ends_at: float) -> SaveHold:
    return SaveHold(name, SavedHold("client", "", "", [name], [[name]], 60.0, ends_at), in_store=True)


def test_of_the_changes_of_a_hold_that_wait_only_the_newest_is_carried_out():
    writing, folder, tasks = writer()
    for second in range(100):
        writing.submit(saved(b"a", second))
    writing.submit(saved(b"b", 1.0))
    writing.submit(DropHold(b"b", in_store=True))
    assert len(tasks) == 2
    for task in tasks:
        task()
    assert folder.changes == 2
    assert {name: hold.ends_at for name, hold in folder.holds.items()} == {b"a": 99.0}


def test_changes_of_a_bounded_number_of_holds_wait(monkeypatch, caplog):
    monkeypatch.setattr(hold_writer, "MAX_WAITING", 2)
    writing, folder, tasks = writer()
    for name in (b"a", b"b", b"c"):
        writing.submit(saved(name, 1.0))
    writing.submit(saved(b"b", 2.0))
    assert len(tasks) == 2 and "a change of a hold is lost" in caplog.text
    for task in tasks:
        task()
    assert {name: hold.ends_at for name, hold in folder.holds.items()} == {b"a": 1.0, b"b": 2.0}
    writing.submit(saved(b"c", 3.0))
    tasks[-1]()
    assert folder.holds[b"c"].ends_at == 3.0, "it goes on once there is room"


def test_a_change_that_fails_does_not_stop_the_next_one(caplog):
    writing, folder, tasks = writer()
    folder.fails = True
    writing.submit(saved(b"a", 1.0))
    tasks[0]()
    assert "a hold could not be written or deleted: no route" in caplog.text
    folder.fails = False
    writing.submit(saved(b"a", 2.0))
    tasks[1]()
    assert folder.holds[b"a"].ends_at == 2.0
