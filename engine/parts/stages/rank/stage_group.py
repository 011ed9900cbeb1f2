"""Pipeline stages: the ranks of one stage as a tensor parallel group, and its links to the previous and next stage.

Rank r of the group of all ranks is rank r % size of stage r // size. So rank 0, which schedules, is in the first stage,
and the ranks of a stage are neighbours, which placement puts on one node.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from engine.distributed.part_group import CONNECT_TIMEOUT_S, PartGroup
from engine.distributed.tp_group import LOADING_TIMEOUT_S, ConnectedGroup, TPGroup
from engine.errors import EngineUnavailable

logger = logging.getLogger(__name__)


class StageGroup(PartGroup):
    """The ranks of this rank's stage, for layers. Calls that concern all ranks (`exchange`, `starting`, `abort`) go to
    the group of all ranks."""

    layers: Sequence[int] = ()  #: number of layers of each stage, once the ranks agree on them

    def __init__(self, all_ranks: ConnectedGroup, stages: int, engine: TPGroup | None = None, states: int = 1):
        """Connect the ranks of each stage, and neighbouring stages. engine: the same ranks as one of several engines
        that share experts. states: hidden states that a link carries for each token. Every rank has to call this within
        `all_ranks.starting()`. Raises StartupError."""
        size = all_ranks.size // stages
        super().__init__(all_ranks, size)
        self.stage, self.stages, self.all_ranks, self.local_size = self.number, stages, all_ranks, all_ranks.local_size
        if isinstance(engine, PartGroup):
            self.all_engines, self.expert_ranks = engine.all_engines, engine.expert_ranks
            self.expert_exchange = engine.expert_exchange
        self.connect_own(f"stage {self.stage}")
        if self.own.local_size < size and self.rank == 0:
            logger.warning("stage %d is on several machines, so its layers sum over the network", self.stage)
        #: Hidden states of whole steps that the link keeps at a time: those that it sends, its share of those that it
        #: receives, and these gathered.
        self.link_copies = states * ((stages + 2) / size + 1)
        self.link = StageLink(all_ranks.process_group("peers", CONNECT_TIMEOUT_S), self)
        all_ranks.on_abort(self.link.abort)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def exchange(self, value: str, timeout_s: float = LOADING_TIMEOUT_S) -> list[str]:
        """Return the value of every rank of every stage."""
        return self.all_ranks.exchange(value, timeout_s)


class StageLink:
    """Sends hidden states to the next stage, and receives those of the previous stage. Used by one thread.

    Each rank sends its share of every row to the rank of the same number in the next stage, which gathers the rows. On
    a CPU, `send` returns before the next stage has received. This has not run with NCCL yet.
    """

    def __init__(self, peers: Any, group: StageGroup):
        """peers: a process group of torch.distributed over all ranks."""
        self._peers, self._group = peers, group
        self._sending: deque[tuple[Any, Tensor]] = deque()  #: with the memory that is being sent

    def send(self, hidden: Tensor) -> None:
        """Send hidden [tokens, hidden]. Raises EngineUnavailable if the next stage is gone."""
        size = self._group.size
        # a copy, since graphs write the next step's states to the same memory
        share = hidden.tensor_split(size, dim=-1)[self._group.rank].clone(memory_format=torch.contiguous_format)
        with self._lost_neighbour():
            # all that may be under way: the next stage may wait for other engines, and these for this stage
            while len(self._sending) > self._group.stages:
                self._sending.popleft()[0].wait()
            self._sending.append((self._peers.send([share], self._group.all_ranks.rank + size, 0), share))

    def receive(self, tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return [tokens, hidden_size]. Raises EngineUnavailable if the previous stage is gone."""
        size = self._group.size
        share = torch.empty(tokens, hidden_size // size, dtype=dtype, device=device)
        with self._lost_neighbour():
            self._peers.recv([share], self._group.all_ranks.rank - size, 0).wait()
        return self._group.all_gather(share)

    def abort(self, reason: str) -> None:
        """Make present and future waits raise. NCCL may block this call, so it runs in a thread."""
        threading.Thread(target=self._peers.abort, name="abort stages", daemon=True).start()

    @contextmanager
    def _lost_neighbour(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise EngineUnavailable(f"a neighbouring stage cannot be reached: {error}") from error
