"""Features of a rank: when they are called, and what they can change."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from torch import Tensor

from engine.config import EngineConfig
from engine.devices.device import StagedCopy
from engine.distributed.tp_group import TPGroup
from engine.errors import StartupError
from engine.model.config import ModelConfig
from engine.model.models.llama import Model
from engine.runner.model_runner import ModelRunner
from engine.runner.open_runner import load_runner
from engine.runner.parts import table
from engine.runner.rank_part import RankPart, RankParts, Run
from engine.runner.rank_setup import RankSetup
from engine.runner.step import Forward, LaunchedStep
from engine.runner.step_layout import StepLayout
from engine.runner.step_memory import StepMemory
from engine.runner.warm_up import SAMPLINGS, plan
from engine.wire.plan import NewSequence, StepPlan, StepResult
from tests.models import make_model
from tests.test_architecture import imported_files

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

    def start(self, run: Run, graphs: Any) -> None:
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


class Failing(RankPart):
    def start(self, run: Run, graphs: Any) -> None:
        raise StartupError("no room")


def test_a_start_that_fails_closes_the_parts_in_reverse(folder, monkeypatch):
    calls: list[str] = []
    parts = [Noting("first", calls), Noting("second", calls), Failing()]
    rows = [SimpleNamespace(has=lambda setup: True, make=lambda setup, part=part: part) for part in parts]
    monkeypatch.setattr(table, "RANK_PARTS", rows)
    config = EngineConfig(model=str(folder), **OPTIONS)
    with pytest.raises(StartupError, match="no room"):
        load_runner(config, ModelConfig.from_folder(folder), folder, TPGroup.single())
    assert calls[-2:] == ["close second", "close first"]


def test_no_part_of_a_rank_knows_another():
    folder = Path(table.__file__).parent
    parts = {folder / f"{spec.place.partition('.')[0]}.py" for spec in table.RANK_PARTS}
    assert all(file.is_file() for file in parts)
    for file in folder.glob("*.py"):
        assert not imported_files(file) & (parts - {file}), f"{file.name} imports another part"


def test_each_row_of_the_table_is_a_part_with_a_name_of_its_own():
    found = []
    for spec in table.RANK_PARTS:
        file, _, name = spec.place.partition(".")
        kind = getattr(importlib.import_module(f"{table.__package__}.{file}"), name)
        assert issubclass(kind, RankPart)
        found.append(kind.name)
    assert all(found) and len({*found}) == len(found)
