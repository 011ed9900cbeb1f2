"""Runs the ranks above 0, which compute their shards of the model as rank 0 plans."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torch import Tensor

from engine.config import EngineConfig
from engine.distributed.plan_broadcast import PlanMessage, PlanReceiver, checksum
from engine.distributed.tp_group import TPGroup
from engine.errors import EngineUnavailable
from engine.kv_offload.rank_tiers import RankTiers, open_tiers
from engine.kv_offload.tier_worker import num_answers
from engine.kv_transfer.fingerprint import fingerprint
from engine.kv_transfer.transport.ranks import KVWorkerInfo, start_kv_worker
from engine.model.checkpoint.overlay import engine_folder
from engine.model.config import ModelConfig
from engine.runner.launching.open_launcher import open_launcher
from engine.runner.model_runner import LaunchedStep, ModelRunner, StepInputs
from engine.runner.rank_setup import read_model, without_idle_moves
from engine.runner.stages.open_runner import open_runner
from engine.wire.lora import AdapterLoad

logger = logging.getLogger(__name__)

LOADING_POLL_S = 0.005  # while an adapter is being loaded, or blocks are being moved
KERNEL_PACKAGES = ("torch", "numba", "triton")  # with other versions, the bits of KV may differ
POLL_INTERVAL_S = 0.2  # how soon a thread notices that it should end


class Worker:
    """One rank above 0. The constructor returns once all ranks have loaded the model; `run` then follows rank 0.

    Raises StartupError if any rank cannot start.
    """

    def __init__(self, config: EngineConfig, group: TPGroup, host: str = "127.0.0.1"):
        """host: IP address at which ranks of other engines reach this one."""
        self._group = group
        with ExitStack() as opened, group.starting():
            folder: Path = engine_folder(config)
            model_config = read_model(config, folder)
            config = without_idle_moves(config, model_config)
            self._runner = open_runner(config, model_config, folder, group)
            start_kv_workers(self._runner, model_config, host, opened)
            self._tiers = start_tiers(self._runner, model_config, folder, opened)
            self._receiver = PlanReceiver(group)
            self._kv_workers = opened.pop_all()
        self._launcher = open_launcher(self._runner, group)
        self._stopping = threading.Event()

    def run(self) -> None:
        """Compute the plans of rank 0 until it ends the group. Raises EngineUnavailable if any rank dies, or samples
        other tokens than rank 0."""
        sampled: dict[int, int] = {}  # step -> checksum, until rank 0 has sent its own
        launched: deque[LaunchedStep | Future[LaunchedStep]] = deque()
        runner = self._runner
        ahead = runner.overlap and runner.device.asynchronous and runner.launches_ahead  # like rank 0
        try:
            for message, inputs in self._ahead() if self._runner.overlap else self._prepared():
                step = message.checked
                if sampled.get(step, message.checksum) != message.checksum:
                    raise EngineUnavailable(f"rank {self._group.rank} sampled other tokens than rank 0 in step {step}")
                sampled = {later: value for later, value in sampled.items() if later > step}
                runner.learn(message.sampled)
                launched.append(self._launcher.launch(inputs))
                if len(launched) > ahead:
                    oldest = launched.popleft()
                    result = runner.collect(oldest.result() if isinstance(oldest, Future) else oldest)
                    if runner.samples:
                        sampled[result.step] = checksum(result)
        finally:
            self._stopping.set()
            if self._runner.adapter_loader is not None:
                self._runner.adapter_loader.close()
            self._kv_workers.close()
            self._launcher.close()
            runner.close()
            self._group.close()
        logger.info("rank ended rank=%d", self._group.rank)

    def stop(self) -> None:
        """Make `run` return. May be called from any thread."""
        self._stopping.set()

    def _prepared(self) -> Iterator[tuple[PlanMessage, StepInputs]]:
        """Yield every plan with its inputs, until rank 0 ends the group or `stop` is called."""
        loading, loader, tiers = 0, self._runner.adapter_loader, self._tiers
        try:
            while not self._stopping.is_set():
                message = self._receiver.receive(LOADING_POLL_S if loading else POLL_INTERVAL_S)
                for answer in loader.answers() if loader is not None else ():
                    self._receiver.answer(answer)
                    loading -= 1
                for moved in tiers.worker.answers() if tiers is not None else ():
                    self._receiver.answer(moved)
                    loading -= 1
                for report in self._runner.experts.answers():
                    self._receiver.answer(report)
                if message is None:
                    continue
                command = message.command
                if isinstance(command, AdapterLoad):
                    if loader is not None:
                        loader.load(command)
                        loading += 1
                    continue
                if command is not None:
                    if tiers is not None:
                        tiers.worker.submit(command)
                        loading += num_answers(command)
                    continue
                if message.plan is None:
                    return
                yield message, self._runner.prepare(message.plan)
        finally:
            self._receiver.close()

    def _ahead(self) -> Iterator[tuple[PlanMessage, StepInputs]]:
        """Yield the items of `_prepared`, which runs in a separate thread, so that a step is prepared while the one
        before it computes."""
        ready: queue.SimpleQueue[tuple[PlanMessage, StepInputs] | BaseException | None] = queue.SimpleQueue()

        def receive() -> None:
            try:
                self._runner.device.set_current()
                for item in self._prepared():
                    ready.put(item)
                ready.put(None)
            except BaseException as error:  # noqa: BLE001 - raised again in `run`
                ready.put(error)
                self._group.abort(str(error))  # `run` may be waiting for a rank that is gone

        threading.Thread(target=receive, name="plans", daemon=True).start()
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item


def start_kv_workers(
    runner: ModelRunner, model: ModelConfig, host: str, opened: ExitStack
) -> tuple[list[KVWorkerInfo], list[KVWorkerInfo]]:
    """Start this rank's workers for KV and for image embeddings. Returns the workers of all ranks for KV, and those for
    embeddings.

    Every rank has to call this within `group.starting()`. model: with the layers of all stages. opened: stack whose
    exit closes the workers.
    Raises StartupError.
    """
    found: list[list[KVWorkerInfo]] = []
    caches, heads = caches_of(runner), [group.spec.num_kv_heads for group in runner.model_config.kv_groups]
    held = zip(model.kv_groups, runner.model_config.kv_groups, strict=True)
    layers = [positions(whole.layers, own.layers) for whole, own in held]
    if model.recurrent is not None and runner.model_config.recurrent is not None and runner.states.num_snapshots:
        heads.append(runner.tp.size)  # each rank reads its part of a state from the same rank of the other engine
        layers.append(positions(model.recurrent.layers, runner.model_config.recurrent.layers))
    images = [] if runner.image_inbox is None else [runner.image_inbox]
    for config, memory, num_heads, own_layers in (
        (runner.config.handoff, caches, heads, layers),
        (runner.config.encode, images, [1], [range(inbox.shape[1]) for inbox in images]),
    ):
        found.append([])
        if config is not None and memory:
            worker, found[-1] = start_kv_worker(config, memory, num_heads, own_layers, runner.tp, host)
            opened.callback(worker.close)
    kv, embeddings = found
    return kv, embeddings


def positions(whole: Sequence[int], own: Sequence[int]) -> range:
    """Return the positions of a stage's layers, which are adjacent, among those of the whole model."""
    start = whole.index(own[0]) if own else 0
    return range(start, start + len(own))


def start_tiers(runner: ModelRunner, model: ModelConfig, folder: Path, opened: ExitStack) -> RankTiers | None:
    """Open this rank's tiers below the KV cache; return None if the config has none. Every rank has to call this within
    `group.starting()`. model: with the layers of all stages. Raises StartupError."""
    config, tp = runner.config, runner.tp
    dtypes = runner.dtype, runner.kv_dtype
    scope = fingerprint(model, folder, *dtypes, runner.block_size, config.determinism, tp.size)
    scope += f"{runner.layout} load_format={config.load_format} torch_compile={config.torch_compile}"
    for package in KERNEL_PACKAGES:
        with suppress(PackageNotFoundError):
            scope += f" {package}={version(package)}"
    return open_tiers(config, caches_of(runner), tp.all_ranks, scope, opened)


def caches_of(runner: ModelRunner) -> list[Tensor]:
    """Return the tensors of all KV cache groups; snapshots of recurrent states are the last."""
    return [*runner.kv_caches, *([runner.states.snapshots] if runner.states.num_snapshots else [])]
