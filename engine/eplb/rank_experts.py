"""Measures the load of experts on one rank, and moves experts between the ranks that share a layer.

The steps go on meanwhile. A thread of each rank exchanges the weights of one layer after the other, through host
memory. They wait in memory of their own until all ranks have theirs. Rank 0 then sends with a plan that the moves take
effect: before that step, each rank copies what has arrived into its slots and changes its table. So all ranks change at
the same step, and no token misses an expert. If a thread fails, rank 0 tells all ranks that nothing moves any more, and
the experts stay where they are.
"""

from __future__ import annotations

import heapq
import logging
import queue
import re
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.devices.device import Device, DeviceEvent
from engine.distributed.tp_group import TPGroup
from engine.eplb.layer_slots import LayerSlots
from engine.eplb.mailbox import Mailbox
from engine.eplb.placement import (
    Move,
    Placement,
    balance,
    balancedness,
    find_moves,
    first_placement,
    rank_loads,
)
from engine.model.expert_split import ExpertLoad, MovableSlots, SpreadExperts
from engine.model.layers.moe import Experts
from engine.options.experts import EPLBConfig
from engine.wire.parts.experts import ExpertAnswer, ExpertOrder, ExpertStats

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 60.0
NUM_TOP = 5  # experts that are named
LAYER = re.compile(r"\.(\d+)\.")
IDLE = 0  # state of a rank of engines that share experts, while none moves (shared_rank_experts.py)


class NoExperts:
    """Stand-in for RankExperts where ranks do not share whole experts."""

    def begin(self, order: ExpertOrder | None, num_tokens: int) -> None:
        pass

    def tell(self) -> int:
        return IDLE

    def turn(self, states: Sequence[int]) -> None:
        pass

    def reset(self) -> None:
        pass

    def answers(self) -> list[ExpertAnswer]:
        return []

    def close(self) -> None:
        pass


@dataclass(slots=True)
class Arrived:
    """Experts of one layer that wait for the plan with which they take effect."""

    layer: int
    placement: Placement
    weights: dict[int, list[Any]]
    """What LayerSlots.write needs, by slot of this rank."""
    moves: int
    """Moves on all ranks."""


class RankExperts(NoExperts):
    """The experts of one rank. `begin` and `reset` are called by the thread that launches steps."""

    def __init__(
        self, layers: dict[int, Experts], tp: TPGroup, device: Device, max_tokens: int, config: EPLBConfig | None
    ):
        """layers: by their number in the model. max_tokens: of a step, padding included. config: None if experts do not
        move. Every rank of a group has to call this. Raises StartupError."""
        self._tp, self._device, self._log = tp, device, config is not None and config.log_balancedness
        self._numbers, self._layers = list(layers), list(layers.values())
        self._splits = [layer.split for layer in self._layers]
        self._sizes = [layer.num_experts for layer in layers.values()]
        shape = len(layers), max(self._sizes, default=1)
        self._counts = torch.zeros(shape, dtype=torch.int64, device=device.torch_device)
        self._index = torch.arange(max_tokens, device=device.torch_device)
        self._real = torch.ones_like(self._index)
        for split, size, counts in zip(self._splits, self._sizes, self._counts, strict=True):
            split.load = ExpertLoad(counts[:size], self._real)
        redundant = 0 if config is None else config.num_redundant_experts
        self._placements = [first_placement(size, tp.size, -(-(size + redundant) // tp.size)) for size in self._sizes]
        self._rank_tokens, self._moved = [0.0] * tp.size, 0
        self._answers: queue.SimpleQueue[ExpertAnswer] = queue.SimpleQueue()
        self._closed = True  # to moves
        self._mail: Mailbox | None = None
        if config is not None:
            self._open_moves()
        self._measurer = ThreadPoolExecutor(1, "expert load", device.begin_background)
        self._mover = ThreadPoolExecutor(1, "expert moves", device.begin_background)

    def _open_moves(self) -> None:
        self._arrived: Arrived | None = None
        self._committed: queue.SimpleQueue[DeviceEvent | None] = queue.SimpleQueue()
        self._slots = [LayerSlots(layer) for layer in self._layers]
        #: Memory on a GPU for experts of one layer that arrive, taken before the KV cache gets the rest.
        self._room = self._slots[0].room() if self._device.asynchronous and self._slots else []
        self._mail, self._closed = Mailbox(self._tp, CONNECT_TIMEOUT_S), False

    # -- called between steps ----------------------------------------------------------------------------------

    def begin(self, order: ExpertOrder | None, num_tokens: int) -> None:
        """Prepare the count of a step of `num_tokens` tokens, and do first what rank 0 has ordered with its plan."""
        if self._device.asynchronous:  # a graph pads steps
            self._real.copy_(self._index < num_tokens)
        if order is not None:
            self._obey(order)

    def _obey(self, order: ExpertOrder) -> None:
        if order.stop:
            self._stop()
        if order.commit:
            self._commit()
        if order.measure:
            counts = self._device.fetch(self._counted())
            self._counts.zero_()
            self._measurer.submit(self._measure, counts, self._device.event(), order.move)

    def _counted(self) -> Tensor:
        """Return the tokens of each expert, [layers, num_experts]."""
        return self._counts.clone()

    def _commit(self) -> None:
        """Let the experts that have arrived take effect."""
        arrived, self._arrived = self._arrived, None
        if arrived is None:  # only experts of other stages have moved
            return
        split = self._splits[arrived.layer]
        assert isinstance(split, SpreadExperts) and isinstance(split.slots, MovableSlots)
        for slot, weights in arrived.weights.items():
            self._slots[arrived.layer].write(slot, weights)
        split.slots.set(arrived.placement)
        self._placements[arrived.layer] = arrived.placement
        self._moved += arrived.moves
        self._committed.put(self._device.event())

    def _stop(self) -> None:
        """Let nothing move any more, and end the threads' waits for each other."""
        self._closed = True
        if self._mail is not None:
            self._arrived = None
            self._committed.put(None)
            self._mail.abort("experts move no more")

    def reset(self) -> None:
        """Forget what has been counted."""
        self._counts.zero_()

    def answers(self) -> list[ExpertAnswer]:
        """Return the answers for rank 0 since the last call."""
        found = []
        while not self._answers.empty():
            found.append(self._answers.get())
        return found

    def close(self) -> None:
        self._stop()
        self._measurer.shutdown(wait=True, cancel_futures=True)
        self._mover.shutdown(wait=True, cancel_futures=True)

    # -- in threads ----------------------------------------------------------------------------------------------

    def _measure(self, counts: Tensor, event: DeviceEvent, move: bool) -> None:
        """Report the load of a window, and let experts move if `move`. counts: [layers, num_experts]."""
        event.wait()
        loads = [row[:size] for row, size in zip(counts.tolist(), self._sizes, strict=True)]
        if move:
            self._mover.submit(self._move, loads)
        if self._tp.rank == 0:
            self._answers.put(ExpertAnswer(load=self._stats(loads)))

    def _stats(self, loads: list[list[int]]) -> ExpertStats:
        of_ranks = [rank_loads(load, where) for load, where in zip(loads, self._placements, strict=True)]
        window = [sum(loads) for loads in zip(*of_ranks, strict=True)] or [0.0] * self._tp.size
        self._rank_tokens = [before + more for before, more in zip(self._rank_tokens, window, strict=True)]
        balanced = balancedness(of_ranks)
        if self._log:
            logger.info("stage=%d balancedness=%.3f rank_tokens=%s", self._tp.stage, balanced, [*map(round, window)])
        shares = (
            (count / sum(load), number, expert)
            for number, load in zip(self._numbers, loads, strict=True)
            for expert, count in enumerate(load)
            if count
        )
        return ExpertStats(
            stage=self._tp.stage,
            rank_tokens=[*map(round, self._rank_tokens)],
            balancedness=balanced,
            top=[(layer, expert, share) for share, layer, expert in heapq.nlargest(NUM_TOP, shares)],
            moved=self._moved,
        )

    def _move(self, loads: list[list[int]]) -> None:
        """Move experts, layer by layer, until all moves have taken effect, moves are stopped, or the engine ends."""
        try:
            for layer, load in enumerate(loads):
                current = self._placements[layer]
                wanted = self._agree(balance(load, current) if self._tp.rank == 0 else current)
                if not (moves := find_moves(current, wanted)):
                    continue
                self._arrived = Arrived(layer, wanted, self._exchange(layer, moves), len(moves))
                self._answers.put(ExpertAnswer(arrived=True))
                event = self._committed.get()
                if event is None:
                    return
                event.wait()
            self._answers.put(ExpertAnswer(done=True))
        except Exception as error:
            if not self._closed:
                logger.exception("rank %d cannot move experts", self._tp.rank)
                self._answers.put(ExpertAnswer(failed=f"rank {self._tp.rank}: {error}"))
            traceback.clear_frames(error.__traceback__)  # an error that somebody keeps would keep connections open

    def _agree(self, wanted: Placement) -> Placement:
        """Return what the first rank wants."""
        assert self._mail is not None
        message = torch.tensor(wanted)
        if self._tp.rank == 0:
            for rank in range(1, self._tp.size):
                self._mail.send(message, rank).wait()
        else:
            self._mail.receive(message, 0).wait()
        return message.tolist()

    def _exchange(self, layer: int, moves: list[Move]) -> dict[int, list[Any]]:
        """Send and receive the experts of a layer. Returns those of this rank, by slot."""
        assert self._mail is not None
        slots, rank, waits = self._slots[layer], self._tp.rank, []
        found: dict[int, list[Tensor]] = {}
        with self._device.beside():
            for move in moves:
                if move.source == rank:  # its slots do not change before all ranks have what they need
                    local = move.source == move.target
                    tensors = [tensor.to("cpu", copy=local) for tensor in slots.read(move.source_slot)]
                elif move.target == rank:
                    tensors = [torch.empty_like(tensor, device="cpu") for tensor in slots.read(0)]
                else:
                    continue
                if move.target == rank:
                    found[move.target_slot] = tensors
                if move.source != move.target:
                    other, act = (move.target, self._mail.send), (move.source, self._mail.receive)
                    peer, call = other if move.source == rank else act
                    waits += [call(tensor, peer) for tensor in tensors]
            for wait in waits:
                wait.wait()
            arrived = {slot: slots.take(self._on_device(slot, tensors)) for slot, tensors in found.items()}
            self._device.event().wait()
        return arrived

    def _on_device(self, slot: int, tensors: list[Tensor]) -> list[Tensor]:
        if not self._room:
            return tensors
        return [room[slot].copy_(tensor) for room, tensor in zip(self._room, tensors, strict=True)]
