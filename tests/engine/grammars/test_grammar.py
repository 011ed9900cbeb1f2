"""Compiling off the step loop, and masks that come late. A test decides when something slow is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine import pocket
from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.core.output import Event
from engine.errors import Overloaded
from engine.grammars import compiler as compiling_module
from engine.grammars import grammar
from engine.grammars.compiler import GrammarCompiler
from engine.grammars.grammar import one_line
from engine.model.config import ModelConfig
from engine.text.chat_tokenizer import ChatTokenizer
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.structured_outputs import StructuredOutputsParams
from engine.wire.token_delta import TokenDelta

LIMIT_S = 60.0


class Gate:
    """Holds up whoever waits at it until it is opened."""

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self.opened.wait(LIMIT_S)


@pytest.fixture
def compiling(monkeypatch) -> Iterator[Gate]:
    """Grammars with "slow" in their text are compiled when the gate opens."""
    gate, source = Gate(), compiling_module.source

    def slow_source(params: StructuredOutputsParams) -> str:
        if "slow" in params.text:
            gate.wait()
        return source(params)

    monkeypatch.setattr(compiling_module, "source", slow_source)
    yield gate
    gate.opened.set()


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def make_core(request, folder):
    cores = []

    def make(**options) -> EngineCore:
        config = {
            "block_size": 4,
            "num_gpu_blocks_override": 200,
            "max_num_seqs": 4,
            "num_threads": 1,
            "async_scheduling": request.param,
        }
        cores.append(build_engine(EngineConfig(model=str(folder), **{**config, **options})))
        return cores[-1]

    yield make
    for core in cores:
        core.close()


class Run:
    """Requests to a core, and what came of them."""

    def __init__(self, core: EngineCore):
        self.core = core
        self.deltas: dict[str, list[TokenDelta]] = {}

    def add(
        self, name: str, *, timeout_s: float | None = None, max_tokens: int | None = None, client: str = "", **form
    ) -> None:
        structure = StructuredOutputsParams(**form) if form else None
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=max_tokens, structured_outputs=structure)
        self.core.add(
            GenerateRequest(request_id=name, prompt=[5, 6, 7], params=params, timeout_s=timeout_s, client=client)
        )
        self.deltas[name] = []

    def step(self) -> None:
        self.record(self.core.step())

    def record(self, events: list[Event]) -> None:
        for event in events:
            assert not self.ended(event.delta.request_id)
            self.deltas[event.delta.request_id].append(event.delta)
        self.core.scheduler.check()

    def until(self, *names: str) -> None:
        for name in names:
            while not self.ended(name):
                self.step()

    def go(self) -> None:
        while self.core.has_work:
            self.step()
        assert all(self.ended(name) for name in self.deltas)

    def ended(self, name: str) -> bool:
        return bool(self.deltas[name] and self.deltas[name][-1].finish_reason)

    def last(self, name: str) -> TokenDelta:
        return self.deltas[name][-1]

    def tokens(self, name: str) -> list[int]:
        return [token for delta in self.deltas[name] for token in delta.token_ids]


# -- compiling -------------------------------------------------------------------------------------------------


def test_a_request_waits_for_its_grammar_and_no_other_waits_with_it(make_core, compiling):
    run = Run(make_core())
    run.add("slow", choice=["slow answer"])
    run.add("plain", max_tokens=20)
    run.add("quick", choice=["quick answer"])
    run.until("plain", "quick")
    stats = run.core.stats()
    assert (stats.waiting, stats.running, run.deltas["slow"]) == (1, 0, [])
    compiling.opened.set()
    run.go()
    assert run.last("slow").finish_reason == "stop" and len(run.tokens("slow")) > 2


def test_an_abort_ends_a_request_that_waits_for_its_grammar(make_core, compiling):
    run = Run(make_core())
    run.add("slow", choice=["slow answer"])
    run.step()
    run.record(run.core.abort("slow"))
    assert (run.last("slow").finish_reason, run.core.has_work) == ("abort", False)
    compiling.opened.set()
    run.add("again", choice=["slow answer"])
    run.go()
    assert run.last("again").finish_reason == "stop"


def test_a_deadline_ends_a_request_that_waits_for_its_grammar(make_core, compiling):
    run = Run(make_core())
    run.add("slow", choice=["slow answer"], timeout_s=0.0)
    run.until("slow")
    assert run.last("slow").error.code == "request_timeout"


def test_a_grammar_that_takes_too_long_ends_its_request_and_may_serve_a_later_one(make_core, compiling, monkeypatch):
    run = Run(make_core())
    run.add("first", choice=["slow answer"])
    assert compiling.reached.wait(LIMIT_S)
    with monkeypatch.context() as patch:
        patch.setattr(compiling_module, "COMPILE_TIMEOUT_S", 0.0)
        run.add("slow", choice=["slow answer"])
        run.until("slow")
    error = run.last("slow").error
    assert (error.status, error.code) == (400, "invalid_parameter")
    assert "structured_outputs.choice must be simple enough to be compiled in" in error.message
    compiling.opened.set()
    run.add("later", choice=["slow answer"])
    run.go()
    assert run.last("later").finish_reason == "stop"


def test_a_request_whose_grammar_had_to_wait_for_those_of_others_may_try_again(make_core, compiling, monkeypatch):
    monkeypatch.setattr(compiling_module, "THREADS", 1)
    run = Run(make_core())
    run.add("slow", choice=["slow answer"])
    assert compiling.reached.wait(LIMIT_S)
    with monkeypatch.context() as patch:
        patch.setattr(compiling_module, "COMPILE_TIMEOUT_S", 0.0)
        run.add("behind", choice=["quick answer"])
        run.until("behind")
    error = run.last("behind").error
    assert (error.status, error.retryable) == (429, True)
    assert "the grammars of other requests took more than 0 s" in error.message


@pytest.mark.parametrize("make_core", [False], ids=["plain"], indirect=True)
def test_a_short_grammar_waits_for_no_long_ones_and_those_of_one_client_wait_for_one_of_another(
    make_core, compiling, monkeypatch
):
    monkeypatch.setattr(compiling_module, "THREADS", 1)
    monkeypatch.setattr("engine.fairness.compile_queue.LONG_CHARS", 50)
    run, compiled = Run(make_core()), []
    source = compiling_module.source
    monkeypatch.setattr(
        compiling_module, "source", lambda params: (compiled.append(params.text[2:9]), source(params))[1]
    )
    for i in range(3):
        run.add(f"slow {i}", client="a", choice=[f"slow {i} " + "a" * 60])
    run.add("other", client="b", choice=["slow b " + "a" * 60])
    run.add("quick", client="a", choice=["quick answer"])
    run.until("quick")
    assert not any(run.deltas[f"slow {i}"] for i in range(3))
    compiling.opened.set()
    run.go()
    assert [text[5] for text in compiled if text[:4] == "slow"] == ["0", "b", "1", "2"]


def test_a_grammar_that_nobody_waits_for_any_more_is_not_compiled_until_somebody_asks_again(
    folder, compiling, monkeypatch
):
    monkeypatch.setattr(compiling_module, "THREADS", 1)
    compiler = GrammarCompiler(folder, ModelConfig.from_folder(folder).vocab_size, frozenset([2]))
    slow, late = (StructuredOutputsParams(choice=[text]) for text in ("slow answer", "late answer"))
    first, behind = compiler.start(slow, [], time.monotonic()), compiler.start(late, [], -100.0)
    compiling.opened.set()
    assert first.compiled.exception(LIMIT_S) is None and isinstance(behind.compiled.exception(LIMIT_S), Overloaded)
    again = compiler.start(late, [], time.monotonic())
    assert again.compiled.result(LIMIT_S).mask
    compiler.close()


def test_requests_that_wait_for_their_grammar_fill_the_queue(make_core, compiling):
    run = Run(make_core(max_waiting=2))
    for i in range(2):
        run.add(f"slow {i}", choice=["slow answer"])
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        run.add("plain")


def test_no_step_is_late_while_all_wait_for_a_grammar(make_core, compiling, monkeypatch):
    run = Run(make_core())
    run.add("slow", choice=["slow answer"])
    run.core.last_step_at -= 100.0
    run.step()
    assert run.core.last_step_age_s < 50.0


def test_an_engine_can_be_closed_while_a_grammar_is_compiled(make_core, compiling):
    core = make_core()
    Run(core).add("slow", choice=["slow answer"])
    assert compiling.reached.wait(LIMIT_S)
    core.close()


def test_a_grammar_is_compiled_once_and_the_least_recently_used_is_forgotten(make_core, monkeypatch):
    compiled, source = [], compiling_module.source

    def noted_source(params: StructuredOutputsParams) -> str:
        compiled.append(params.regex)
        return source(params)

    monkeypatch.setattr(compiling_module, "source", noted_source)
    monkeypatch.setattr(compiling_module, "MAX_CACHED_GRAMMARS", 2)
    run = Run(make_core())
    for i, regex in enumerate(["aa", "bb", "aa", "cc", "aa", "bb"]):
        run.add(str(i), regex=regex)
        run.go()
    assert compiled == ["aa", "bb", "cc", "bb"]


def test_equal_texts_of_different_kinds_are_different_grammars(make_core):
    run = Run(make_core())
    text = '{"type": "object"}'
    run.add("json", json=text)
    run.add("choice", choice=[text])
    run.go()
    tokenizer = ChatTokenizer.from_folder(Path(run.core.config.model))
    assert tokenizer.decode(run.tokens("choice")) == text != tokenizer.decode(run.tokens("json"))


# -- masks -----------------------------------------------------------------------------------------------------


@pytest.fixture
def mask_calls(monkeypatch) -> list[Callable[[], None]]:
    """Each is called before the next mask of an output is computed."""
    calls: list[Callable[[], None]] = []
    compute_mask = grammar.compute_mask

    def observed(*args) -> bytes:
        if calls:
            calls.pop(0)()
        return compute_mask(*args)

    monkeypatch.setattr(grammar, "compute_mask", observed)
    return calls


def test_a_mask_that_takes_long_holds_up_its_own_request_only(make_core, mask_calls):
    gate = Gate()
    mask_calls += [lambda: None, gate.wait]
    run = Run(make_core())
    run.add("slow", choice=["slow answer"])
    while not gate.reached.is_set():
        run.step()
    run.add("plain", max_tokens=20)
    run.add("other", max_tokens=20)
    run.until("plain", "other")
    assert len(run.tokens("slow")) == 2
    gate.opened.set()
    run.go()
    assert run.last("slow").finish_reason == "stop"


def test_a_mask_that_cannot_be_computed_ends_its_own_request_only(make_core, mask_calls):
    def fail() -> None:
        raise RuntimeError("too complex")

    mask_calls += [lambda: None, fail]
    run = Run(make_core())
    run.add("bad", choice=["slow answer"])
    run.until("bad")
    run.add("good", choice=["good answer"])
    run.go()
    error = run.last("bad").error
    assert (error.code, error.status) == ("invalid_parameter", 400)
    assert "structured_outputs.choice must be simple enough to follow (too complex)" in error.message
    assert run.last("good").finish_reason == "stop"


def test_masks_name_the_tokens_by_the_bytes_that_become_text(folder):
    for path in (folder, pocket.PATH):
        config, ours = ModelConfig.from_folder(path), ChatTokenizer.from_folder(path)
        compiler = GrammarCompiler(path, config.vocab_size, frozenset(config.eos_token_ids))
        for token in range(config.vocab_size):
            text = ours.token_bytes(token)
            if not ours.is_special(token) and not text.startswith(b"\xff"):  # in no valid UTF-8
                assert compiler._tokenizer.decode_bytes([token]) == text
        compiler.close()


@pytest.mark.parametrize("name", ["NoExtension", "NoExtensionBias", "LexerTooComplex", "ParserTooComplex"])
def test_names_inside_llguidance_are_told_in_words(name):
    message = one_line(f"matcher stopped: {name}")
    assert name not in message
    assert message.count(" ") >= 5, "a name is no explanation"
