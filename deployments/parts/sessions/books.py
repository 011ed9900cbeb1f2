"""The books of sessions in the store, which all ingresses write."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar
from weakref import WeakValueDictionary

import msgspec

from deployments.parts.sessions.errors import SessionNotFound
from deployments.parts.sessions.record import PARENT_HEADER, Asked, SessionTree, StoredTurn
from deployments.storage.key_value import KeyValueStore, StoreUnavailable, sealed
from engine.errors import InvalidParameter

T = TypeVar("T")
TTL_S = 24 * 3600.0
"""Seconds after its last request when a session ends."""
MAX_SESSIONS = 1000
"""Sessions of an API key, without those below others. The one that was unused for longest then ends."""
LISTED_S = 600.0
"""Seconds after which the list of sessions learns again that one is used."""
TRIES = 32  # to write before another ingress does
LOST_S = 0.01  # maximum pause after another ingress was first


class SessionBooks:
    """Sessions by owner (the name of an API key) and name. Owners cannot see each other's. All methods that wait raise
    StoreUnavailable and StoredValueCorrupt."""

    def __init__(self, store: KeyValueStore, wall: Callable[[], float] = time.time):
        """wall: returns seconds since 1970."""
        self._store, self._wall = store, wall
        self._locks = WeakValueDictionary[str, asyncio.Lock]()  # so that turns of this ingress wait for each other

    def now(self) -> float:
        """Return seconds since 1970."""
        return self._wall()

    async def begin(
        self, owner: str, asked: Asked, turn: StoredTurn, *, need: int, resumes: bool
    ) -> tuple[str, SessionTree]:
        """Add a turn to its session, which begins with it if necessary. Returns the session at the top, and what is
        known of it and all below it. need, resumes: as in SessionTree.begin. Raises SessionBudgetSpent,
        InvalidParameter."""
        if asked.session == asked.parent:
            raise InvalidParameter(PARENT_HEADER, asked.parent, "the name of another session than the request's own")
        root = await self._root_of(owner, asked.session)
        if root is None and asked.parent:
            root = await self._root_of(owner, asked.parent) or asked.parent
        root, now = root or asked.session, self.now()
        if root != asked.session:  # before the turn: who finds the session has to find its turns
            await self._store.set(_place_key(owner, asked.session), root.encode(), TTL_S)

        def add(tree: SessionTree | None) -> tuple[SessionTree, bool]:
            tree = SessionTree(secrets.token_hex(8)) if tree is None else tree
            known = asked.session in tree.sessions
            parent = asked.parent if known or asked.parent or asked.session == root else root
            tree.begin(replace(asked, parent=parent), turn, now, need=need, resumes=resumes)
            is_due = now - tree.listed_at > LISTED_S
            tree.listed_at = now if is_due else tree.listed_at
            return tree, is_due

        done = await self._change(owner, root, add)
        assert done is not None, "`add` always adds"
        tree, is_due = done
        if is_due:
            await self._list(owner, root, now)
        return root, tree

    async def write(
        self, owner: str, root: str, epoch: str, edit: Callable[[SessionTree], T | None]
    ) -> tuple[SessionTree, T] | None:
        """Change a session and all below it. edit: returns None if there is nothing to write, and may be called several
        times. Returns None if it did, or if the session was deleted."""

        def change(tree: SessionTree | None) -> tuple[SessionTree, T] | None:
            done = None if tree is None or tree.epoch != epoch else edit(tree)
            return None if tree is None or done is None else (tree, done)

        return await self._change(owner, root, change)

    async def find(self, owner: str, name: str) -> tuple[str, SessionTree]:
        """Return the session at the top of the one of this name, and all below it. Raises SessionNotFound."""
        root = await self._root_of(owner, name)
        tree = None if root is None else self._decoded(owner, root, await self._store.get(_tree_key(owner, root)))
        if root is None or tree is None or name not in tree.sessions:
            raise SessionNotFound(name, TTL_S, self._store.shared)
        return root, tree

    async def listed(self, owner: str) -> list[str]:
        """Return the names of an owner's sessions that are below no other, the one that was used last first."""
        stored = await self._store.get(_list_key(owner))
        used_at = {} if stored is None else self._store.unsealed(_list_key(owner), stored, _decode_list)
        return sorted(used_at, key=lambda name: -used_at[name])

    async def delete(self, owner: str, name: str) -> list[str]:
        """End a session and all below it, and return their names. What a session below another one has used, the other
        keeps. Turns that run are not counted any more. Raises SessionNotFound."""
        root, tree = await self.find(owner, name)
        below = tree.below(name)
        if name == root:
            await self._store.delete(_tree_key(owner, root))
            await self._edit_list(owner, lambda used_at: used_at.pop(root, None) is not None)
        else:

            def remove(tree: SessionTree) -> bool | None:
                if name not in tree.sessions:
                    return None
                tree.remove(name)
                return True

            await self.write(owner, root, tree.epoch, remove)
        for each in below:
            await self._store.delete(_place_key(owner, each))
        return below

    async def _root_of(self, owner: str, name: str) -> str | None:
        """Return the session at the top of the one of this name; None if there is none of this name."""
        if await self._store.get(_tree_key(owner, name)) is not None:
            return name
        if (place := await self._store.get(_place_key(owner, name))) is None:
            return None
        root = place.decode()
        return None if await self._store.get(_tree_key(owner, root)) is None else root

    async def _change(
        self, owner: str, root: str, edit: Callable[[SessionTree | None], tuple[SessionTree, T] | None]
    ) -> tuple[SessionTree, T] | None:
        """Write what `edit` has made of a session, unless it returns None. edit: may be called several times."""
        key = _tree_key(owner, root)
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            for _ in range(TRIES):
                stored = await self._store.get(key)
                done = edit(self._decoded(owner, root, stored))
                if done is None or await self._store.replace(key, stored, _encoded(done[0]), TTL_S):
                    return done
                await asyncio.sleep(random.uniform(0.0, LOST_S))
        raise StoreUnavailable(f"other ingresses write session {root!r} all the time")

    def _decoded(self, owner: str, root: str, stored: bytes | None) -> SessionTree | None:
        return None if stored is None else self._store.unsealed(_tree_key(owner, root), stored, _decode_tree)

    async def _list(self, owner: str, root: str, now: float) -> None:
        """Tell the list that a session is used, and end those that are too many."""
        too_many: list[str] = []

        def use(used_at: dict[str, float]) -> bool:
            used_at[root] = now
            for old in [name for name, at in used_at.items() if at < now - TTL_S - LISTED_S]:
                del used_at[old]
            too_many[:] = sorted(used_at, key=lambda name: used_at[name])[: max(0, len(used_at) - MAX_SESSIONS)]
            for name in too_many:
                del used_at[name]
            return True

        await self._edit_list(owner, use)
        for name in too_many:
            await self._store.delete(_tree_key(owner, name))

    async def _edit_list(self, owner: str, edit: Callable[[dict[str, float]], bool]) -> None:
        """edit: returns whether there is something to write, and may be called several times."""
        key = _list_key(owner)
        for _ in range(TRIES):
            stored = await self._store.get(key)
            used_at = {} if stored is None else self._store.unsealed(key, stored, _decode_list)
            if not edit(used_at) or await self._store.replace(
                key, stored, sealed(msgspec.msgpack.encode(used_at)), TTL_S + LISTED_S
            ):
                return
            await asyncio.sleep(random.uniform(0.0, LOST_S))
        raise StoreUnavailable("other ingresses begin sessions of this key all the time")


def _tree_key(owner: str, root: str) -> str:
    return f"manta:session:{owner}:{root}"


def _place_key(owner: str, name: str) -> str:
    """Return the key of the name of the session at the top of one that is below others."""
    return f"manta:session-of:{owner}:{name}"


def _list_key(owner: str) -> str:
    return f"manta:sessions:{owner}"


def _encoded(tree: SessionTree) -> bytes:
    return sealed(msgspec.msgpack.encode(tree))


_decode_tree = msgspec.msgpack.Decoder(SessionTree).decode
_decode_list = msgspec.msgpack.Decoder(dict[str, float]).decode
