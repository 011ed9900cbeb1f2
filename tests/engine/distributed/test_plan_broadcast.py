from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.assembly.build import build_engine
from engine.assembly.open_worker import open_worker
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.distributed import plan_broadcast
from engine.distributed.cluster_key import ClusterKey
from engine.distributed.plan_broadcast import PlanBroadcaster, PlanReceiver
from engine.distributed.tp_group import TPGroup
from engine.errors import EngineUnavailable, RendezvousTimeout, StartupError
from engine.runner.worker import Worker
from engine.wire.generate_request import GenerateRequest
from engine.wire.plan import BlockChange, NewSequence, StepPlan, StepResult
from engine.wire.sampling_params import SamplingParams
from tests.engine.distributed.test_tp_group import connect, on_all
from tests.models import make_model
from tests.refused import Refused

LIMIT_S = 60.0


def make_plan(step: int) -> StepPlan:
    added = [NewSequence(3, [5, 6, 7], 3, SamplingParams(seed=5, logit_bias={4: 1.0}), 2**64 - 1)]
    return StepPlan(step, added, [BlockChange(3, 0, [1, 2])], [3], [0], [3], [True])


class Ranks:
    """Rank 0's end and the others', all in this process."""

    def __init__(self, size: int, **options):
        groups = connect(size, **options)
        ends = on_all(size, lambda rank: PlanReceiver(groups[rank]) if rank else PlanBroadcaster(groups[rank]))
        self.broadcaster: PlanBroadcaster = ends[0]
        self.receivers: list[PlanReceiver] = ends[1:]

    def close(self) -> None:
        self.broadcaster.close()
        for receiver in self.receivers:
            receiver.close()


@pytest.fixture(params=[(2, None), (4, None), (4, ClusterKey.generate())], ids=["2", "4", "4 with a key"])
def ranks(request) -> Iterator[Ranks]:
    size, key = request.param
    ranks = Ranks(size, key=key)
    yield ranks
    ranks.close()


def test_every_receiver_receives_every_plan_in_order(ranks):
    plans = [make_plan(step) for step in range(1, 20)]
    for plan in plans:
        ranks.broadcaster.send(plan)
    for receiver in ranks.receivers:
        assert [receiver.receive(LIMIT_S).plan for _ in plans] == plans


def test_the_tokens_that_rank_0_sampled_are_told_with_a_later_plan(ranks):
    result = StepResult(1, [[7, 8], [], [-1]], [None] * 3, [None] * 3)
    ranks.broadcaster.send(make_plan(1))
    ranks.broadcaster.committed(result)
    ranks.broadcaster.send(make_plan(2))
    for receiver in ranks.receivers:
        assert receiver.receive(LIMIT_S).checked == 0
        message = receiver.receive(LIMIT_S)
        assert (message.checked, message.checksum) == (1, plan_broadcast.checksum(result))
    assert plan_broadcast.checksum(result) != plan_broadcast.checksum(
        msgspec.structs.replace(result, tokens=[[7, 0], [], [-1]])
    )


def test_the_end_is_told_even_if_plans_are_still_on_the_way(ranks):
    for step in range(50):
        ranks.broadcaster.send(make_plan(step))
    ranks.broadcaster.close()
    for receiver in ranks.receivers:
        messages = [receiver.receive(LIMIT_S) for _ in range(51)]
        assert [message.plan is None for message in messages] == [False] * 50 + [True]


def test_a_missing_plan_ends_the_receiver(ranks):
    ranks.broadcaster.send(make_plan(1))
    ranks.broadcaster._number += 1  # as if one were lost
    ranks.broadcaster.send(make_plan(2))
    for rank, receiver in enumerate(ranks.receivers, start=1):
        receiver.receive(LIMIT_S)
        with pytest.raises(EngineUnavailable, match=f"rank {rank} missed plan 2 and received plan 3"):
            receiver.receive(LIMIT_S)


def test_a_receiver_notices_that_rank_0_is_gone(ranks):
    ranks.broadcaster._context.destroy(linger=0)  # without a goodbye, as when it is killed
    for receiver in ranks.receivers:
        with pytest.raises(EngineUnavailable, match="rank 0 is gone"):
            receiver.receive(LIMIT_S)


def test_rank_0_notices_that_a_receiver_is_gone_and_says_which(ranks):
    ranks.broadcaster.check()
    ranks.receivers[-1].close()
    ranks.broadcaster._socket.poll(LIMIT_S * 1000)
    with pytest.raises(EngineUnavailable, match=f"rank {len(ranks.receivers)} is gone"):
        ranks.broadcaster.check()


@pytest.mark.parametrize("junk", [b"\x00rank x", b"\x00rank 99999999", b"\x00rank 0", b"\x01rank", b"\xc1", b"no rank"])
def test_what_no_rank_sends_is_refused_and_rank_0_goes_on(junk):
    """The junk is sent as a subscription where it is one, else as a message, which an XSUB socket may send."""
    ranks, refused = Ranks(2), Refused("plans", "malformed")
    with zmq.Context() as context, context.socket(zmq.XSUB) as stranger:
        stranger.connect(ranks.broadcaster._socket.last_endpoint)
        stranger.send(b"\x01" + junk[1:] if junk[0] == 0 else junk)
        stranger.send(junk)
        while not refused.count:
            assert ranks.broadcaster._socket.poll(LIMIT_S * 1000)
            ranks.broadcaster.check()
    ranks.broadcaster.send(make_plan(1))
    assert ranks.receivers[0].receive(LIMIT_S).plan == make_plan(1)
    ranks.close()


def test_a_stranger_hears_no_plan_and_is_counted(monkeypatch):
    monkeypatch.setattr("engine.distributed.handshake_monitor.LOOK_S", 0.0)
    ranks, refused = Ranks(2, key=ClusterKey.generate()), Refused("plans", "unauthenticated")
    with zmq.Context() as context, context.socket(zmq.SUB) as stranger:
        stranger.subscribe(b"")
        stranger.connect(ranks.broadcaster._socket.last_endpoint)
        while not refused.count:
            ranks.broadcaster.check()
        ranks.broadcaster.send(make_plan(1))
        assert ranks.receivers[0].receive(LIMIT_S).plan == make_plan(1)
        assert not stranger.poll(50)
    ranks.close()


@settings(max_examples=40)
@given(junk=st.binary(max_size=30))
def test_no_bytes_end_a_receiver_of_plans(one_receiver, junk):
    broadcaster, receiver = one_receiver
    broadcaster._socket.send(junk)
    with suppress(EngineUnavailable):  # bytes that are a plan, with a number that is not due
        assert receiver.receive(LIMIT_S) is None
    broadcaster._number = receiver._number
    broadcaster.send(make_plan(1))
    assert receiver.receive(LIMIT_S).plan == make_plan(1)


@pytest.fixture(scope="module")
def one_receiver():
    ranks = Ranks(2)
    yield ranks.broadcaster, ranks.receivers[0]
    ranks.close()


def test_a_receiver_without_plans_returns_to_its_caller(ranks):
    assert ranks.receivers[0].receive(0.01) is None


def test_rank_0_does_not_wait_for_ever_for_receivers_that_load_but_do_not_listen(monkeypatch):
    monkeypatch.setattr(plan_broadcast, "JOIN_TIMEOUT_S", 0.2)
    groups = connect(3)
    receivers: list[PlanReceiver] = []
    ends = [
        lambda: PlanBroadcaster(groups[0]),
        lambda: receivers.append(PlanReceiver(groups[1])),
        lambda: groups[2].exchange(""),
    ]
    with pytest.raises(RendezvousTimeout, match="rank 2 of 3"):
        on_all(3, lambda rank: ends[rank]())
    receivers[0].close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "llama")


def start(config: EngineConfig, groups: list[TPGroup], worker_config: EngineConfig) -> tuple[EngineCore, Worker]:
    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(open_worker, worker_config, groups[1])
        core = build_engine(config, groups[0])
        return core, worker.result()


def compute(core: EngineCore) -> None:
    while core.has_work:
        core.step()


def make_config(folder, **options) -> EngineConfig:
    defaults = {
        "dtype": "float32",
        "num_gpu_blocks_override": 64,
        "tensor_parallel_size": 2,
        "num_threads": 1,
        "max_num_seqs": 8,
    }
    return EngineConfig(**{"model": str(folder), **defaults, **options})


def in_thread(function: Callable[[], None]) -> tuple[threading.Thread, list[Exception]]:
    errors: list[Exception] = []

    def run() -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_all_ranks_have_as_many_blocks_as_the_one_with_the_fewest(folder):
    config = make_config(folder)
    core, worker = start(config, connect(2), replace(config, num_gpu_blocks_override=20))
    assert core.ranks.runner.num_blocks == worker._runner.num_blocks == [20]
    assert core.max_model_len == worker._runner.max_model_len == 20 * 16
    thread, errors = in_thread(worker.run)
    core.close()
    thread.join(LIMIT_S)
    assert not errors


@pytest.mark.parametrize("overlap", [True, False])
def test_a_rank_that_samples_other_tokens_than_rank_0_stops_the_engine(folder, overlap):
    config = make_config(folder, async_scheduling=overlap)
    core, worker = start(config, connect(2), config)
    worker._runner._inputs._uniform.draw = lambda seed, position: 0.999
    thread, errors = in_thread(worker.run)
    params = SamplingParams(temperature=2.0, seed=1, max_tokens=200, ignore_eos=True)
    core.add(GenerateRequest(request_id="a", prompt=[5, 6, 7], params=params))
    with pytest.raises(EngineUnavailable, match="rank 1"):
        compute(core)
    thread.join(LIMIT_S)
    assert "rank 1 sampled other tokens than rank 0" in str(errors[0])
    core.close()


def test_an_engine_is_told_why_another_rank_could_not_load(folder):
    config = make_config(folder)
    with pytest.raises(StartupError, match=r"rank 1: .*missing"):
        start(config, connect(2), replace(config, model="/missing"))


def test_a_model_that_does_not_divide_names_the_key(folder):
    groups = connect(3)
    config = make_config(folder, tensor_parallel_size=3)
    with pytest.raises(StartupError, match="configuration: tensor_parallel_size must be a divisor"):
        on_all(3, lambda rank: open_worker(config, groups[rank]) if rank else build_engine(config, groups[0]))


def test_a_group_of_another_size_than_configured_is_refused(folder):
    with pytest.raises(StartupError, match="tensor_parallel_size"):
        build_engine(make_config(folder, tensor_parallel_size=2))
