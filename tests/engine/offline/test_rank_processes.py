"""The offline engine with its ranks in child processes: how they live and how they die."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.distributed import plan_broadcast
from engine.errors import EngineUnavailable, StartupError
from engine.offline import rank_processes
from engine.offline.rank_processes import RankProcesses
from tests.processes import started

PROMPTS = [[5, 6, 7], [8] * 30, [9, 10]]
NOTICE_S = 60.0  # less than a collective waits
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


def start(folder: Path, size: int, **options) -> LLM:
    defaults = {"dtype": "float32", "num_gpu_blocks_override": 256, "num_threads": 1, "device": "cpu"}
    return LLM(str(folder), tensor_parallel_size=size, **{**defaults, **options})


def generate(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [request.outputs[0].token_ids for request in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.fixture
def leaves_nothing():
    """Processes and sockets are after the test what they were before; shared memory has no name (test_tp_group.py)."""
    before = remains()
    yield
    gc.collect()
    wait_until(lambda: remains() == before)


def remains() -> tuple[set[int], set[str]]:
    processes = {process.pid for process in psutil.Process().children(recursive=True)}
    own = {os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "@manta-" in line]
    return processes, {fields[-1] for fields in sockets if f"socket:[{fields[6]}]" in own}


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)  # processes end on their own


def ranks_of(llm: LLM) -> list[psutil.Process]:
    assert llm._ranks is not None
    return [psutil.Process(process.pid) for process in llm._ranks.processes]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_an_engine_over_processes_answers_like_one_process_and_ends(folder, leaves_nothing, size):
    kinds = [SamplingParams(temperature=t, seed=1, max_tokens=20, ignore_eos=True) for t in (0.0, 1.0)]
    with start(folder, 1) as llm:
        expected = [generate(llm, params) for params in kinds]
    with start(folder, size) as llm:
        ranks = ranks_of(llm)
        assert [generate(llm, params) for params in kinds] == expected
        assert len(ranks) == size - 1 and all(rank.is_running() for rank in ranks)
    assert [process.returncode for process in llm._ranks.processes] == [0] * (size - 1), "they ended in order"


SLOW_END = """
import atexit, threading
from engine.offline import rank_processes

rank_processes._run = lambda task, parent: atexit.register(threading.Event().wait)
rank_processes.main()
"""


def test_a_rank_ends_in_order_however_long_its_interpreter_would_take_to_end():
    """On a busy machine, unloading torch took longer than the parent waits."""
    task = msgspec.json.encode(rank_processes.RankTask(1, "", EngineConfig(model="pocket"), key=None))
    assert subprocess.run([sys.executable, "-c", SLOW_END], input=task + b"\n", timeout=60).returncode == 0


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"async_scheduling": True}, id="overlap"),
        pytest.param({"async_scheduling": False}, id="plain", marks=pytest.mark.slow),
        pytest.param({"disable_custom_all_reduce": True}, id="gloo", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_killed_during_a_step_ends_the_engine_within_seconds(folder, leaves_nothing, options):
    with start(folder, 2, **options) as llm:
        outputs = [llm.request(prompt, LONG) for prompt in PROMPTS]
        running = llm.run(((output, LONG) for output in outputs), use_tqdm=False)
        killed_at: list[float] = []

        def kill() -> None:
            if llm.stats().generation_tokens > 30 and not killed_at:
                ranks_of(llm)[0].kill()
                killed_at.append(time.monotonic())

        step = llm._core.step
        llm._core.step = lambda: (kill(), step())[1]  # type: ignore[method-assign]
        with pytest.raises(EngineUnavailable, match="rank 1"):
            list(running)
        assert time.monotonic() - killed_at[0] < NOTICE_S


@pytest.mark.slow
def test_a_rank_that_is_killed_while_nothing_runs_is_noticed_by_the_next_step(folder, leaves_nothing):
    with start(folder, 2) as llm:
        generate(llm, SamplingParams(max_tokens=3))
        ranks_of(llm)[0].kill()
        llm._ranks.processes[0].wait()
        with pytest.raises(EngineUnavailable, match="rank 1"):
            generate(llm, LONG)


@pytest.mark.slow  # tests/engine/distributed/test_plan_broadcast.py has it within one process
def test_a_rank_that_hangs_is_noticed_by_its_silence(folder, leaves_nothing, monkeypatch):
    monkeypatch.setattr(plan_broadcast, "SILENCE_MS", 1500)
    monkeypatch.setattr(plan_broadcast, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(rank_processes, "END_TIMEOUT_S", 0.5)
    with start(folder, 2) as llm:
        generate(llm, SamplingParams(max_tokens=3))
        ranks_of(llm)[0].suspend()
        started = time.monotonic()
        with pytest.raises(EngineUnavailable, match="rank 1 is gone"):
            generate(llm, LONG)
        assert time.monotonic() - started < NOTICE_S


@pytest.fixture
def sigint_ignored():
    """SIGINT is ignored under nohup, and in many CI runners."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.usefixtures("sigint_ignored")
def test_ranks_end_when_the_process_that_started_them_does(folder, leaves_nothing, death):
    code = f"""
from engine import LLM
llm = LLM({str(folder)!r}, tensor_parallel_size=2, num_gpu_blocks_override=64, num_threads=1, device="cpu")
print(llm._ranks.processes[0].pid, flush=True)
while True:
    llm.generate([[5, 6, 7]], use_tqdm=False)
"""
    with started([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        rank = psutil.Process(int(parent.stdout.readline()))
        try:
            parent.send_signal(death)
            parent.wait(timeout=60)
            wait_until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)
        finally:
            with suppress(psutil.NoSuchProcess):
                rank.kill()  # nobody's child any more, if its parent has ended


@pytest.mark.slow
def test_ranks_of_an_engine_that_was_dropped_without_close_end(folder, leaves_nothing):
    llm = start(folder, 2)
    generate(llm, SamplingParams(max_tokens=3))
    del llm


@pytest.mark.slow
def test_a_rank_that_cannot_start_says_why_and_takes_the_others_with_it(folder, leaves_nothing, monkeypatch):
    begin = RankProcesses._start

    def misinform(self, task):
        begin(self, msgspec.structs.replace(task, config=replace(task.config, model="/missing")))

    monkeypatch.setattr(RankProcesses, "_start", misinform)
    with pytest.raises(StartupError, match=r"rank 1: .*missing"):
        start(folder, 2)


def test_a_rank_that_dies_before_the_rendezvous_ends_the_start(folder, leaves_nothing, monkeypatch):
    begin = RankProcesses._start

    def kill(self, task):
        begin(self, task)
        self.processes[-1].kill()

    monkeypatch.setattr(RankProcesses, "_start", kill)
    started = time.monotonic()
    with pytest.raises(StartupError, match="rank 1 was killed by signal 9"):
        start(folder, 2)
    assert time.monotonic() - started < NOTICE_S


def test_a_model_that_does_not_divide_names_the_key_and_starts_no_process(folder, leaves_nothing, monkeypatch):
    monkeypatch.setattr(RankProcesses, "_start", lambda self, task: pytest.fail("a process was started"))
    with pytest.raises(StartupError, match="tensor_parallel_size must be a divisor"):
        start(folder, 3)
