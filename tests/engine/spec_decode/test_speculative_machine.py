"""Real engines with every drafter: whatever comes and goes, tokens and ends are those of a plain engine that computes
each request alone.

Which tokens a draft is rejected at, ended by a stop string or cut off by max_tokens is left to chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.options.speculation import SpeculativeConfig
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.speculation import Prediction
from engine.wire.sampling_params import SamplingParams
from engine.wire.structured_outputs import StructuredOutputsParams
from tests.engine.spec_decode.draft_checkpoints import DRAFTERS, NUM_DRAFTS, VOCAB, make_drafters
from tests.examples import examples
from tests.fake_drafter import draft_always

PROMPTS = [
    [5, 6, 7],
    [40] * 12,
    [3, 4, 5, 6, 7, 8, 9, 3, 4],
    [*range(20, 76)],
]  # the last goes over a border of recurrent states
FORMS = [  # one that no drafter guesses, and one that ends what it guesses
    StructuredOutputsParams(regex="(yes|no|perhaps)( (yes|no|perhaps)){0,4}"),
    StructuredOutputsParams(regex="(?s).{1,15}"),
]
MAX_TOKENS = 20
SMALL = {"block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 16, "num_threads": 1, "max_model_len": 136}


class Kind(NamedTuple):
    """What a text depends on beside its prompt."""

    temperature: float
    seed: int
    form: StructuredOutputsParams | None
    min_tokens: int

    def params(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            seed=self.seed,
            structured_outputs=self.form,
            min_tokens=min(self.min_tokens, max_tokens),
            max_tokens=max_tokens,
        )


kinds = st.builds(
    Kind, st.sampled_from([0.0, 0.9]), st.integers(0, 2), st.sampled_from([None, *FORMS]), st.sampled_from([0, 4])
)


built: list[EngineCore] = []


@dataclass
class Sent:
    prompt: list[int]
    kind: Kind
    max_tokens: int
    stop: tuple[int, int]
    """Two tokens in a row that end the text: a stop string, which only the engine's client knows."""
    output: list[int]
    reason: str | None = None

    def add(self, tokens: list[int]) -> bool:
        """Return whether the text ends at its stop string."""
        for token in tokens:
            self.output.append(token)
            if tuple(self.output[-2:]) == self.stop:
                return True
        return False


@cache
def folders() -> tuple[TemporaryDirectory[str], dict[str, tuple[Path, dict]]]:
    directory = TemporaryDirectory()
    return directory, make_drafters(Path(directory.name))


@cache
def engine(folder: Path, dtype: str, method: str | None = None, overlap: bool = False) -> EngineCore:
    speculative = None
    if method is not None:
        speculative = SpeculativeConfig(num_speculative_tokens=NUM_DRAFTS, **folders()[1][method][1])
    blocks = 64 if method is None else 36  # so that requests are preempted
    options = {"dtype": dtype, "async_scheduling": overlap, "num_gpu_blocks_override": blocks, **SMALL}
    config = EngineConfig(model=str(folder), speculative_config=speculative, **options)
    built.append(build_engine(config))
    return built[-1]


@pytest.fixture(autouse=True, scope="module")
def closed():
    yield
    for core in built:
        core.close()
    for cached in (engine, whole, folders):
        cached.cache_clear()
    built.clear()


@cache
def whole(folder: Path, dtype: str, prompt: tuple[int, ...], kind: Kind) -> tuple[list[int], str]:
    """The longest answer to a prompt that is computed alone, and why it ends."""
    core = engine(folder, dtype)
    core.add(GenerateRequest(request_id="alone", prompt=list(prompt), params=kind.params(MAX_TOKENS)))
    tokens: list[int] = []
    while True:
        for event in core.step():
            tokens += event.delta.token_ids
            if event.delta.finish_reason:
                return tokens, event.delta.finish_reason


def expected(folder: Path, dtype: str, prompt: list[int], kind: Kind, max_tokens: int) -> tuple[list[int], str]:
    tokens, reason = whole(folder, dtype, tuple(prompt), kind)
    return tokens[:max_tokens], "length" if max_tokens < len(tokens) else reason


class SpeculativeMachine(RuleBasedStateMachine):
    method: str

    @initialize(dtype=st.sampled_from(["float32", "bfloat16"]), overlap=st.booleans(), always=st.booleans())
    def start(self, dtype, overlap, always):
        self.patch = pytest.MonkeyPatch()
        if always:
            draft_always(self.patch)
        self.model = folders()[1][self.method][0], dtype
        self.core = engine(*self.model, self.method, overlap)
        self.sent: dict[str, Sent] = {}

    @rule(
        prompt=st.sampled_from(PROMPTS),
        kind=kinds,
        max_tokens=st.integers(1, MAX_TOKENS),
        stop=st.tuples(st.integers(3, VOCAB), st.integers(3, VOCAB)),
        at=st.integers(0, 30),
        predicted=st.booleans(),
    )
    def add(self, prompt, kind, max_tokens, stop, at, predicted):
        answer, _ = expected(*self.model, prompt, kind, max_tokens)
        if at + 1 < len(answer):
            stop = answer[at], answer[at + 1]
        name = f"r{len(self.sent)}"
        prediction = [VOCAB - 1 if i == at else token for i, token in enumerate(answer)] if predicted else []
        predicted_output = Prediction(prediction) if prediction else None
        request = GenerateRequest(request_id=name, prompt=prompt, params=kind.params(max_tokens))
        self.core.add(request.asking(predicted_output))
        self.sent[name] = Sent(prompt, kind, max_tokens, stop, [])

    @rule(steps=st.integers(1, 5))
    def step(self, steps):
        for _ in range(steps):
            for event in self.core.step() if self.core.has_work else ():
                sent = self.sent[event.delta.request_id]
                assert event.delta.error is None, event.delta.error
                if sent.reason is not None:
                    continue
                if sent.add(event.delta.token_ids):
                    sent.reason = "stop string"
                    self.core.abort(event.delta.request_id, "stop")
                else:
                    sent.reason = event.delta.finish_reason
            self.core.scheduler.check()

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.sent)))
        if self.sent[name].reason is None:
            self.core.abort(name)
            self.sent[name].reason = "abort"

    def teardown(self):
        if not hasattr(self, "core"):
            return
        while self.core.has_work:
            self.step(1)
        self.patch.undo()
        assert self.core.scheduler.kv_cache.pool.num_used == 0
        for sent in self.sent.values():
            tokens, reason = expected(*self.model, sent.prompt, sent.kind, sent.max_tokens)
            if sent.reason in ("abort", "stop string"):
                assert sent.output == tokens[: len(sent.output)]
                assert sent.reason == "abort" or tuple(sent.output[-2:]) == sent.stop
            else:
                assert (sent.output, sent.reason) == (tokens, reason)
                assert sent.stop not in pairwise(tokens)


def case_of(method: str) -> type:
    machine = type(f"{method}Machine", (SpeculativeMachine,), {"method": method})
    machine.TestCase.settings = settings(max_examples=examples(16), stateful_step_count=20)
    return machine.TestCase


TestNgram, TestSuffix, TestDraftModel, TestSameModel, TestNoisyModel, TestEagle3, TestMTP, *_ = map(case_of, DRAFTERS)
TestHybridNgram, TestHybridModel, TestHybridMTP = map(case_of, DRAFTERS[-3:])
for like_another in (TestSameModel, TestNoisyModel, TestSuffix, TestHybridModel, TestHybridMTP):
    like_another.pytestmark = pytest.mark.slow
