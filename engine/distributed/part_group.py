"""A tensor parallel group that is a part of a larger group: a pipeline stage, or one of several engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from engine.distributed.exchange.expert_exchange import ExpertExchange
from engine.distributed.tp_group import ConnectedGroup, TPGroup

CONNECT_TIMEOUT_S = 60.0


class PartGroup(TPGroup):
    """Some ranks of a larger group. Rank r of the larger group is rank r % size of part r // size. A part starts and
    ends together with all others."""

    expert_exchange: ExpertExchange | None = None  #: with the ranks of other engines that share experts

    def __init__(self, whole: ConnectedGroup, size: int):
        """size: ranks of each part. `number` is then that of this one."""
        self.number, rank = divmod(whole.rank, size)
        super().__init__(rank, size, whole.key)
        self.host = whole.host
        self._whole = whole
        self.own: TPGroup = TPGroup.single()  #: the ranks of this part

    def connect_own(self, name: str, collectives: bool = True) -> None:
        """Connect the ranks of this part. name: of the part, unlike those of others. collectives: as for
        `TPGroup.connect`. Every rank of the larger group has to call this at the same time. Raises StartupError."""
        if self.size > 1:
            own = self._whole.part(name, self.rank, self.size, collectives=collectives)
            own.join(CONNECT_TIMEOUT_S)
            self.own = own

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.own.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self.own.all_gather(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.own.reduce_scatter(x)

    def process_group(self, name: str, timeout_s: float, *, on_hosts: bool = False) -> Any:
        return self.own.process_group(name, timeout_s, on_hosts=on_hosts)

    @contextmanager
    def starting(self) -> Iterator[None]:
        with self._whole.starting():
            yield

    def before_close(self, release: Callable[[], None]) -> None:
        self._whole.before_close(release)

    def on_abort(self, call: Callable[[str], None]) -> None:
        self.own.on_abort(call)

    def abort(self, reason: str) -> None:
        self._whole.abort(reason)

    def close(self) -> None:
        self._whole.close()
