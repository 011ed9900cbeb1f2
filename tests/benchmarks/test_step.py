from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch

from benchmarks import command, memory_floor, step
from benchmarks.step import PARTS, Stopwatch
from tests.models import make_model

SMALL = ["--batch-sizes", "1,3", "--context-len", "20", "--steps", "4", "--threads", "1"]


@pytest.fixture(autouse=True)
def short_read(monkeypatch):
    monkeypatch.setattr(memory_floor, "READ_BYTES", 2**22)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def run(folder, capsys):
    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            command.run(step.main, ["--model", str(folder), *SMALL, *arguments])
        assert ended.value.code == 0
        return capsys.readouterr().out

    return run


def test_parts_are_positive_and_no_more_than_the_whole(run):
    fields = json.loads(run("--json"))
    assert (fields["dtype"], fields["threads"], fields["profile"]) == ("float32", 1, None)
    assert [batch["batch_size"] for batch in fields["batches"]] == [1, 3]
    for batch in fields["batches"]:
        assert list(batch["parts"]) == list(PARTS)
        assert all(us > 0 for us in batch["parts"].values())
        assert max(batch["parts"].values()) < batch["total_us"]
        floor_us = (batch["weight_bytes"] + batch["kv_bytes"]) / fields["bandwidth_gb_per_s"] / 1e3
        assert batch["floor_us"] == pytest.approx(floor_us)
        assert batch["total_over_floor"] == pytest.approx(batch["total_us"] / floor_us)
        # the prompt, its first token, and unmeasured steps; then the middle of those that count
        assert 20 + step.UNMEASURED <= batch["context_len"] <= 20 + step.UNMEASURED + 4


def test_prompts_that_do_not_fit_into_one_step_are_computed_first(run):
    fields = json.loads(run("--json", "--max-num-batched-tokens", "7", "--block-size", "4"))
    assert [batch["batch_size"] for batch in fields["batches"]] == [1, 3]
    assert fields["batches"][1]["context_len"] > 20


def test_a_profile_names_operations_and_layers_the_costliest_first(run):
    fields = json.loads(run("--json", "--profile", "--profile-rows", "1000"))
    times = [op["self_us"] for op in fields["profile"]]
    assert times == sorted(times, reverse=True)
    calls = {op["op"]: op["calls"] for op in fields["profile"]}
    assert calls["Attention"] == 3  # layers
    assert calls["schedule"] == calls["forward"] == 1
    assert any(name.startswith("aten::") for name in calls)
    assert len(json.loads(run("--json", "--profile", "--profile-rows", "2"))["profile"]) == 2


def test_the_table_shows_every_part_and_the_floor(run):
    shown = run("--profile")
    for name in (*PARTS, "total", "floor", "total / floor", "GB/s", "own time of the operations", "batch size 3"):
        assert name in shown


@pytest.fixture
def message_of(folder, capsys):
    """The one line of an error that the user can mend."""

    def message_of(*arguments: str) -> str:
        with pytest.raises(SystemExit) as exit_info:
            command.run(step.main, ["--model", str(folder), *SMALL, *arguments])
        assert exit_info.value.code == 1
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return message_of


@pytest.mark.parametrize(
    ("sizes", "message"),
    [("1,x", "batch_sizes must be numbers with commas"), ("0", "batch_sizes must be at least 1"), ("", "at least 1")],
)
def test_a_wrong_batch_size_is_one_clear_line(message_of, sizes, message):
    assert message in message_of("--batch-sizes", sizes)


def test_a_context_that_is_too_long_is_an_error_that_names_the_longest(run, message_of):
    line = message_of("--context-len", "510")
    longest = re.search(r"context_len must be at most (\d+), with 4 steps and batches of 3: .* 512 tokens", line)
    assert longest is not None, line
    run("--context-len", longest[1])
    message_of("--context-len", str(int(longest[1]) + 1))


def test_a_method_does_not_count_what_it_calls(monkeypatch):
    now = 0.0
    monkeypatch.setattr(step, "time", SimpleNamespace(perf_counter=lambda: now))

    class Engine:
        def outer(self) -> str:
            wait(1.0)
            self.inner()
            self.inner()
            wait(2.0)
            return "done"

        def inner(self) -> None:
            wait(10.0)

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    engine, watch = Engine(), Stopwatch(torch.device("cpu"))
    watch.wrap(engine, "outer", "a")
    watch.wrap(engine, "inner", "b")
    assert engine.outer() == "done"
    assert watch.take() == {"a": 3e6, "b": 20e6}
    assert watch.take() == {}
    Engine().inner()  # another engine is not watched
    assert watch.take() == {}
