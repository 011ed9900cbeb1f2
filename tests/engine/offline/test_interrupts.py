"""Ctrl-C while an engine computes: the next call finds it as if nothing had been."""

from __future__ import annotations

import signal

import pytest

from engine import LLM, SamplingParams
from engine.core.block_pool import BlockPool
from engine.core.request_queue import RequestQueue
from engine.offline.interrupts import held_interrupts

PROMPTS = [[5, 6, 7], [8, 9], [10] * 20]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True)
def pythons_handler():
    """Whatever a runner of tests, or a test before, has made of Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, num_gpu_blocks_override=64, max_num_seqs=2, num_threads=1) as llm:
        yield llm


@pytest.mark.parametrize(
    ("place", "method"),
    [(RequestQueue, "add"), (RequestQueue, "run"), (RequestQueue, "remove"), (BlockPool, "allocate")],
)
@pytest.mark.parametrize("after", [False, True])
def test_the_engine_goes_on_after_an_interrupt_wherever_it_comes(llm, monkeypatch, place, method, after):
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    original = getattr(place, method)

    def interrupted(*args, **kwargs):
        if not after:
            signal.raise_signal(signal.SIGINT)
        result = original(*args, **kwargs)
        if after:
            signal.raise_signal(signal.SIGINT)
        monkeypatch.undo()
        return result

    monkeypatch.setattr(place, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert llm.stats().running == llm.stats().waiting == llm.stats().blocks_used == 0
    again = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    assert again == expected


def interrupt_twice(reached: list[str]) -> None:
    with held_interrupts():
        signal.raise_signal(signal.SIGINT)
        reached.append("first")
        signal.raise_signal(signal.SIGINT)
        reached.append("second")


def test_the_second_interrupt_does_not_wait():
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupt_twice(reached)
    assert reached == ["first"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_users_is_called_at_once():
    called = []
    before = signal.signal(signal.SIGINT, lambda number, frame: called.append(number))
    try:
        with held_interrupts():
            signal.raise_signal(signal.SIGINT)
            assert called == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)
