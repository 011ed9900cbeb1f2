"""What an engine does when another engine that shares its experts is lost: it ends too, or it goes on."""

from __future__ import annotations

import logging
import time

import torch

from engine.devices.free_memory import FreeMemory
from engine.distributed.data_parallel.data_parallel_group import DataParallelGroup
from engine.distributed.data_parallel.roster import Lost, Message
from engine.distributed.data_parallel.survivors import Survivors
from engine.eplb.lost_experts import LostExperts
from engine.errors import EngineUnavailable, RendezvousTimeout, StartupError
from engine.model.state import KeptStates
from engine.parts.experts.rank.shared_rank import SharedRank
from engine.runner.step import LaunchedStep, StepInputs

logger = logging.getLogger(__name__)


class NoRecovery:
    """All engines end together."""

    generation = 0  #: number of losses so far
    pause_s = 0.0  #: seconds in which this engine took no steps because another was lost
    resumed_at = 0.0  #: when the last of these pauses ended, by `time.monotonic`

    def __init__(self, rank: SharedRank, group: DataParallelGroup):
        self._rank, self._group = rank, group
        self._lost: str | None = None

    @property
    def lost(self) -> str | None:
        """Why the engines take no steps together any more; None if they do."""
        return self._lost

    def hear(self, message: Message) -> None:
        """Take note of what another engine says. May be called from any thread."""
        if isinstance(message, Lost):
            self._lost = message.reason
            self._group.abort(message.reason)

    @property
    def num_engines(self) -> int:
        """Number of engines that have not been lost."""
        return self._group.expert_exchange.members.engines

    def launch(self, inputs: StepInputs) -> LaunchedStep:
        """Launch a step. It can be launched again if this raises EngineUnavailable and `recover` returns."""
        return self._rank.runner.launch(inputs)

    def recover(self, reason: str) -> LaunchedStep | None:
        """Return once steps can be launched again, with the engines that are left. Raises EngineUnavailable if this
        engine has to end, too. reason: why another was lost. Returns the step whose launch was interrupted, if it need
        not be launched again."""
        raise EngineUnavailable(reason)

    def close(self) -> None:
        """End `recover`. May be called from any thread."""


class Recovery(NoRecovery):
    """An engine that goes on without those that are lost.

    The step that a loss interrupts is launched again from its inputs. It then writes the same values to the same
    places: tokens, KV and embeddings of images. Only states of recurrent layers change in place, and a snapshot may be
    overwritten in the step that restores it; so both are put back first. Nothing of a step is sampled before its last
    exchange with other engines.

    All ranks of an engine have to launch the same steps again. So a launch returns only once all of them have computed
    the step; if a loss interrupts that wait, they tell each other how many steps they have computed.
    """

    def __init__(self, rank: SharedRank, group: DataParallelGroup):
        super().__init__(rank, group)
        setup = rank.setup
        self._survivors = Survivors(group)
        folder = None if setup.config.load_format == "dummy" else setup.folder
        self._experts = LostExperts(rank.model, folder, self._free_memory)
        self._num_computed = 0  # steps
        #: States from before the step whose launch was interrupted, and the step if this rank has computed it.
        self._interrupted: tuple[KeptStates, LaunchedStep | None] = [], None

    def hear(self, message: Message) -> None:
        self._survivors.hear(message)

    def close(self) -> None:
        self._survivors.close()

    @property
    def lost(self) -> str | None:
        return self._survivors.lost

    @property
    def num_engines(self) -> int:
        return self._survivors.num_engines

    def launch(self, inputs: StepInputs) -> LaunchedStep:
        rank, computed = self._rank, None
        states = [] if rank.states is None else rank.states.keep(inputs.plan)
        try:
            launched = rank.runner.launch(inputs)
            self._check()
            computed = launched
            self._num_computed += 1
            self._group.all_reduce(torch.zeros(1, device=rank.setup.torch_device))
            self._check()
            return launched
        except EngineUnavailable:
            self._interrupted = states, computed
            raise

    def _check(self) -> None:
        """Raise EngineUnavailable if an engine has been lost meanwhile. An aborted collective of a GPU leaves wrong
        values, and raises no error."""
        if self._rank.setup.device.asynchronous:
            self._rank.setup.device.event().wait()
            if self.lost is not None:
                raise EngineUnavailable(self.lost)

    def recover(self, reason: str) -> LaunchedStep | None:
        started = time.monotonic()
        while True:
            try:
                ranks = self._survivors.regroup(reason)
                num_read = self._experts.share(ranks)
                self._rank.experts.use(ranks, self._experts.placements)
                num_computed = min(map(int, self._group.exchange(str(self._num_computed))))
                break
            except StartupError as failure:
                if type(failure) not in (StartupError, RendezvousTimeout):
                    raise  # this engine's own
                reason = str(failure)  # another engine was lost
        (states, launched), self._interrupted = self._interrupted, ([], None)
        if num_computed < self._num_computed:
            launched, self._num_computed = None, num_computed
        if launched is None and self._rank.states is not None:
            self._rank.states.put_back(states)
        self.generation, self.resumed_at = self._survivors.generation, time.monotonic()
        pause_s = self.resumed_at - started
        self.pause_s += pause_s
        logger.warning(
            "engine goes on generation=%d engines=%d experts_read=%d pause_s=%.3f",
            self.generation, self.num_engines, num_read, pause_s,
        )  # fmt: skip
        return launched

    def _free_memory(self) -> FreeMemory:
        """Return the memory that this engine can take for more experts."""
        device = self._rank.setup.device
        free = device.free_memory()
        return free if device.asynchronous else free.shared_by(self._group.all_engines.local_size)
