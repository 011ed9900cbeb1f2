"""Features of a rank: when they are called, and what they can change."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from torch import Tensor

from engine.assembly import open_runner
from engine.config import EngineConfig
from engine.devices.device import StagedCopy
from engine.distributed.tp_group import TPGroup
from engine.errors import StartupError
from engine.model.config import ModelConfig
from engine.model.models.llama import Model
from engine.parts.table import RANK_PARTS
from engine.runner.graphs.warm_up import SAMPLINGS, plan
from engine.runner.layer_runner import LayerRunner, Run
from engine.runner.model_runner import ModelRunner
from engine.runner.rank_part import RankPart, RankParts
from engine.runner.rank_setup import RankSetup
from engine.runner.step import EditLogits, Forward, LaunchedStep, StepMemory
from engine.runner.step_layout import SampledTokens, StepLayout
from engine.wire.plan import NewSequence, StepPlan, StepResult
from tests.imports import ROOT
from tests.models import make_model

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 8, "max_num_seqs": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "llama")


def open_with(folder, *parts: RankPart) -> ModelRunner:
    config = EngineConfig(model=str(folder), **OPTIONS)
    setup = RankSetup.of(config, ModelConfig.from_folder(folder), folder, TPGroup.single())
    return ModelRunner(setup, RankParts(parts))


def prompt(*tokens: int) -> StepPlan:
    step = plan([len(tokens)], [len(tokens)], SAMPLINGS[0], 0)
    step.added[0] = NewSequence(0, list(tokens), len(tokens), SAMPLINGS[0], seed=0)
    return step


def compute(runner: ModelRunner, step: StepPlan) -> StepResult:
    return runner.collect(runner.launch(runner.prepare(step)))


class Noting(RankPart):
    """Notes all calls, and what has become of its inputs."""

    def __init__(self, name: str, calls: list[str]):
        self.name, self._calls = name, calls  # type: ignore[misc]

    def _note(self, what: str) -> None:
        self._calls.append(f"{what} {self.name}")

    def extend(self, model: Model) -> None:
        self._note("extend")

    def attach(self, model: Model) -> None:
        self._note("attach")

    def allocate(self, memory: StepMemory) -> None:
        self._note("allocate")

    def start(self, run: Run, runner: LayerRunner) -> None:
        self._note("start")

    def prepare(self, plan: StepPlan, layout: StepLayout, staged: StagedCopy) -> Tensor:
        self._note("prepare")
        return staged.add(layout.positions + 1)

    def before(self, step: Forward) -> None:
        self._note("before")

    def after(self, step: LaunchedStep, out: Tensor, tokens: Tensor) -> None:
        self._note("after")
        step.of[self.name] = len(out) + len(tokens)

    def collected(self, step: LaunchedStep, result: StepResult) -> StepResult:
        self._note("collected")
        return structs.replace(result, draft_s=result.draft_s + step.of[self.name] + sum(step.inputs.of[self.name]))

    def close(self) -> None:
        self._note("close")


def test_what_begins_with_a_step_first_ends_it_last_and_each_part_finds_its_own_inputs(folder):
    calls: list[str] = []
    runner = open_with(folder, Noting("first", calls), RankPart(), Noting("second", calls))
    result = compute(runner, prompt(5, 6, 7))
    runner.close()
    there = [f"{what} {name}" for what in ("extend", "attach", "allocate", "start", "prepare", "before")
             for name in ("first", "second")]  # fmt: skip
    back = [f"{what} {name}" for what in ("after", "collected", "close") for name in ("second", "first")]
    assert calls == there + back
    assert result.draft_s == 2 * (3 + 1 + 1 + 2 + 3), "rows, a token and positions"


class Replacing(RankPart):
    """Gives the second token of a prompt the embedding of another one."""

    name = "replacing"

    def __init__(self, other: int):
        self._other = other

    def attach(self, model: Model) -> None:
        self._model = model

    def prepare(self, plan: StepPlan, layout: StepLayout, staged: StagedCopy) -> tuple[Tensor, Tensor]:
        return staged.add(np.array([1])), staged.add(np.array([self._other]))

    def before(self, step: Forward) -> None:
        row, token = step.inputs.of[self.name]
        step.embeddings = row, self._model.embed(token)


def test_rows_whose_embeddings_a_part_gives_are_computed_from_these(folder):
    plain = open_with(folder)
    wanted, others = compute(plain, prompt(5, 9, 7)), compute(plain, prompt(5, 6, 7))
    found = compute(open_with(folder, Replacing(9)), prompt(5, 6, 7))
    assert found.tokens == wanted.tokens != others.tokens


class Choosing(RankPart):
    """Gives a token the largest logit, in each row."""

    def __init__(self, token: int):
        self._token = token

    def edits(self, plan: StepPlan, sampled: SampledTokens, staged: StagedCopy) -> EditLogits | None:
        row, token = (staged.add(np.array([number])) for number in (0, self._token))
        return lambda logits: logits.index_put_((row, token), logits.max() + 1)


def test_logits_are_what_the_parts_make_of_them_one_after_the_other(folder):
    plain = compute(open_with(folder, RankPart()), prompt(5, 6, 7)).tokens
    assert compute(open_with(folder, Choosing(9), Choosing(11)), prompt(5, 6, 7)).tokens == [[11]] != plain
    assert compute(open_with(folder, Choosing(11), Choosing(9)), prompt(5, 6, 7)).tokens == [[9]] != plain


class Failing(RankPart):
    def start(self, run: Run, runner: LayerRunner) -> None:
        raise StartupError("no room")


def test_a_start_that_fails_closes_the_parts_in_reverse(folder, monkeypatch):
    calls: list[str] = []
    parts = [Noting("first", calls), Noting("second", calls), Failing()]
    monkeypatch.setattr(open_runner, "make_rank_parts", lambda setup: RankParts(parts))
    config = EngineConfig(model=str(folder), **OPTIONS)
    with pytest.raises(StartupError, match="no room"):
        open_runner.load_runner(config, ModelConfig.from_folder(folder), folder, TPGroup.single())
    assert calls[-2:] == ["close second", "close first"]


def test_each_row_of_the_table_is_a_part_with_a_name_of_its_own():
    """Each file of a rank's end is imported, and each class there that is a part has its own key in steps."""
    kinds = set[type[RankPart]]()
    for name in RANK_PARTS:
        folder = ROOT / "engine" / "parts" / name / "rank"
        modules = [importlib.import_module(f"engine.parts.{name}.rank.{file.stem}") for file in folder.glob("*.py")]
        found = {kind for module in modules for kind in vars(module).values() if is_part(kind)}
        assert found, name
        kinds |= found
    names = [kind.name for kind in kinds if kind.__base__ is RankPart]
    assert all(names) and len({*names}) == len(names)


def is_part(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, RankPart) and kind is not RankPart
