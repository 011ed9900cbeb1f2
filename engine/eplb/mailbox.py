"""Messages between ranks, beside their collectives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.distributed.tp_group import TPGroup
from engine.errors import EngineUnavailable


class Mailbox:
    """Sends tensors in host memory from rank to rank, by gloo. The messages of one rank to another arrive in order.
    Tensors must be contiguous, and must live until the wait has ended."""

    def __init__(self, ranks: TPGroup, timeout_s: float):
        """Connect to the other ranks. Every rank has to call this. Raises StartupError."""
        self._group, self._broken = ranks.process_group("mailbox", timeout_s, on_hosts=True), ""
        ranks.on_abort(self.abort)

    def send(self, x: Tensor, rank: int) -> Any:
        """Begin to send x, and return what waits for the end."""
        return self._open().send([x.view(-1).view(torch.uint8)], rank, 0)

    def receive(self, x: Tensor, rank: int) -> Any:
        """Begin to fill x with what a rank sends, and return what waits for the end."""
        return self._open().recv([x.view(-1).view(torch.uint8)], rank, 0)

    def abort(self, reason: str) -> None:
        """Close this rank's connections, which ends the waits of others for it. Nothing in gloo ends a wait of this
        rank, which ends when the other rank closes its connections. May be called from any thread."""
        self._broken, self._group = reason, None

    def _open(self) -> Any:
        if (group := self._group) is None:
            raise EngineUnavailable(self._broken)
        return group
