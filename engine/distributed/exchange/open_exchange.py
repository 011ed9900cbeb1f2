"""Opens an exchange by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from engine.config import ONE_SIDED
from engine.distributed.exchange.all_gather import AllGather
from engine.distributed.exchange.all_to_all import AllToAll
from engine.distributed.exchange.members import Exchange, Members
from engine.distributed.exchange.one_sided import OneSided, RowSizes


def exchange_named(backend: str, sizes: RowSizes) -> Callable[[Members], Exchange]:
    """Return what opens the exchange of this name, a value of `all2all_backend`."""
    if backend == ONE_SIDED:
        return partial(OneSided, sizes=sizes)
    return AllToAll if backend == "alltoall" else AllGather
