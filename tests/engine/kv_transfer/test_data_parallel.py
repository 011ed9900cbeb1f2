"""Handoffs between engines that share experts: each engine of a group hands KV over, and takes it, on its own."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from engine.config import EngineConfig
from engine.distributed.data_parallel.data_parallel_group import DataParallelGroup
from engine.distributed.group_options import group_options
from engine.distributed.tp_group import TPGroup
from engine.serving.server import EngineServer
from engine.wire.messages import EngineStatus, Notice, kinds_of
from engine.wire.parts.handoffs import DispatchRemote, Prefill
from tests.engine.kv_transfer.test_families import LENGTHS, alone, flat, make_config, prompt
from tests.engine_sockets import LIMIT_MS, Ingress, ServerThread, bind
from tests.models import make_model
from tests.rank_pool import TIMEOUT_S, RankPool, run_worker
from tests.shared_engines import run_rank


class Group:
    """The engines of a replica, and what they tell its control actor. The first rank is in this process."""

    def __init__(self, context: zmq.Context, config: EngineConfig, pool: RankPool):
        self.config, self._pool = config, pool
        self.inbox = context.socket(zmq.PULL)
        status_to = bind(self.inbox)
        options = {**group_options(config), "device": "cpu"}
        self._ranks = TPGroup.listen(config.world_size, **options)
        call = run_rank if config.data_parallel_size > 1 else run_worker
        for rank in range(1, config.world_size):
            pool.call(rank, call, config, rank, self._ranks.address, options)
        self._ranks.join(TIMEOUT_S)
        group: TPGroup = self._ranks
        if config.data_parallel_size > 1:
            self._ranks.exchange(status_to)
            group = DataParallelGroup(self._ranks, config.num_ranks, config.pipeline_parallel_size)
        server = EngineServer(
            config, engine_id=f"{config.data_parallel_size} engines", status_to=status_to, group=group
        )
        addresses = [server.address]
        if config.data_parallel_size > 1:
            addresses = self._ranks.exchange(server.address)[:: config.num_ranks]
        self.thread = ServerThread(server)
        self.ingresses = [Ingress(context, SimpleNamespace(address=address)) for address in addresses]  # type: ignore[arg-type]
        self.statuses: dict[str, EngineStatus] = {}

    def stop(self) -> None:
        if self.config.data_parallel_size > 1:
            self._ranks.exchange("the test has ended")
        self.thread.stop()
        for rank in range(1, self.config.world_size):
            self._pool.answer(rank)
        assert self.thread.error is None, self.thread.error

    def received(self) -> list[int]:
        """Handoffs of which each engine has received the KV."""
        told = [status.handoffs for status in self.statuses.values()]
        return [0 if handoffs is None else sum(handoffs.results.get("received", {}).values()) for handoffs in told]


class Pools:
    """A decode group and a prefill group; the test plays their control actors, and gives prompts to the engines of the
    prefill group in turn."""

    def __init__(
        self, context: zmq.Context, decode: EngineConfig, prefill: EngineConfig, pools: tuple[RankPool, RankPool]
    ):
        self.decode, self.prefill = Group(context, decode, pools[0]), Group(context, prefill, pools[1])
        self._decode = msgspec.msgpack.Decoder(kinds_of(Notice)).decode
        self._num_sent = 0

    def run_until(self, condition: Any) -> None:
        """Do the work of the control actors until a condition holds."""
        poller = zmq.Poller()
        groups = self.decode, self.prefill
        sockets = {ingress._socket: ingress for group in groups for ingress in group.ingresses}
        for socket in (*(group.inbox for group in groups), *sockets):
            poller.register(socket, zmq.POLLIN)
        while not condition():
            ready = dict(poller.poll(LIMIT_MS))
            assert ready, "it did not come to that"
            for group in groups:
                if group.inbox in ready:
                    self._handle(group, self._decode(group.inbox.recv()))
            for socket, ingress in sockets.items():
                if socket in ready:
                    ingress.gather()

    def _handle(self, group: Group, notice: Notice) -> None:
        match notice:
            case EngineStatus():
                group.statuses[notice.engine_id] = notice
            case DispatchRemote(remote_request):
                self.prefill.ingresses[self._num_sent % len(self.prefill.ingresses)].send(Prefill(remote_request))
                self._num_sent += 1


@contextmanager
def running(decode: EngineConfig, prefill: EngineConfig, pools: tuple[RankPool, RankPool]) -> Any:
    context = zmq.Context()
    with ExitStack() as stack:
        stack.callback(context.destroy, linger=0)
        found = Pools(context, decode, prefill, pools)
        stack.callback(found.prefill.stop)
        stack.callback(found.decode.stop)
        yield found


SHARED = {"data_parallel_size": 2, "enable_expert_parallel": True}
STAGES = {**SHARED, "pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("family", "dtype", "decode", "prefill"),
    [
        ("qwen3_moe", "bfloat16", SHARED, {"tensor_parallel_size": 2}),
        pytest.param("deepseek_v3", "float32", {}, {**SHARED, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_next", "float32", SHARED, {}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", "bfloat16", SHARED, SHARED, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "float32", STAGES, {"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_prompts_computed_by_a_group_of_another_layout_give_the_bits_of_one_engine(
    tmp_path, ranks, family, dtype, decode, prefill
):
    options = {"dtype": dtype, "determinism": "strict"}
    folder = make_model(tmp_path, family)
    expected = alone(folder, **options)
    configs = make_config(folder, "decode", **options, **decode), make_config(folder, "prefill", **options, **prefill)
    with running(*configs, ranks) as pools:
        ingresses = pools.decode.ingresses
        for number, ingress in enumerate(ingresses):
            for length in LENGTHS:
                ingress.add(f"{number} {length}", prompt(length), logprobs=0)
        names = [f"{number} {length}" for number in range(len(ingresses)) for length in LENGTHS]
        deltas = {name: ingresses[int(name[0])].deltas[name] for name in names}
        pools.run_until(lambda: all(found and found[-1].finish_reason for found in deltas.values()))
        assert [flat(deltas[name]) for name in names] == expected * len(ingresses)
        each = [len(LENGTHS)] * len(ingresses)
        pools.run_until(lambda: pools.decode.received() == each)
