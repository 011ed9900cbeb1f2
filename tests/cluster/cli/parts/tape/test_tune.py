from __future__ import annotations

import json

import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli.main import app
from engine.core.prompt_budget import PromptBudget
from engine.errors import InvalidParameter
from tests.cluster.lab.recorded.taped_engine import record

SMALL = ("--trace", "fixed", "--requests", "60", "--replicas", "2", "--max-num-seqs", "2")


@pytest.fixture(scope="module")
def tape(tmp_path_factory):
    return record(tmp_path_factory.mktemp("tapes"), "engine-1")


def tune(*args: object, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, ["tune", *map(str, args)], env={"COLUMNS": "200"})
    assert result.exit_code == exit_code, result.exception or result.output
    return result.output


def test_from_a_tape_comes_a_change_with_its_effect_and_the_error(tape):
    found = json.loads(tune("--tape", tape, "--ttft-ms", "0.001", "--json"))
    assert found["changes"].keys() <= {"max_num_seqs", "max_num_batched_tokens"}
    assert found["gpus"] == [1, 1] and found["tried"] > 5
    assert set(found["errors"]) == set(found["before"]) == set(found["after"])
    shown = tune("--tape", tape, "--tpot-ms", "1000")
    assert "8 requests in 1 engines" in shown and "recorded" in shown and "good requests, %" in shown


def test_a_change_is_printed_as_keys_of_serve_config():
    shown = tune(*SMALL, "--rate", "40", "--ttft-ms", "300", "--objective", "goodput")
    assert "the error is not known" in shown
    section = yaml.safe_load(shown.partition("serve_config.yaml:\n")[2])
    assert section["engine"]["max_num_seqs"] > 2


def test_the_requests_of_another_trace_run_on_the_cluster_of_the_tape(tape, tmp_path):
    (tmp_path / "t.jsonl").write_text('{"timestamp": 0, "input_length": 20, "output_length": 10}\n' * 30)
    shown = tune("--tape", tape, "--trace", tmp_path / "t.jsonl")
    assert "30 requests; " in shown and "recorded " not in shown.partition("30 requests")[2].partition("+/- is")[0]


def test_a_target_that_no_cluster_keeps_ends_with_exit_code_1():
    shown = tune(*SMALL, "--objective", "cost", "--ttft-ms", "0.001", exit_code=1)
    assert "no cluster with up to 2 GPUs" in shown


def test_a_tape_that_decides_otherwise_here_is_refused(tape, monkeypatch):
    monkeypatch.setattr(PromptBudget, "tokens", lambda self, left: min(left, 3))
    result = CliRunner().invoke(app, ["tune", "--tape", str(tape)])
    assert isinstance(result.exception, InvalidParameter) and "the plan is another one" in str(result.exception)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], "--tape"),
        (["--trace", "fixed", "--autoscale", "9"], "--autoscale"),
        (["--tape", "TAPE", "--replicas", "3"], "--replicas"),
        (["--tape", "TAPE", "--burstiness", "0.5"], "--burstiness"),
        (["--tape", "TAPE", "--try", "max_num_seqs"], "--try"),
        (["--tape", "TAPE", "--try", "max_num_seqs=4,x"], "--try"),
    ],
)
def test_what_contradicts_or_says_nothing_is_refused(args, named, tape):
    result = CliRunner().invoke(app, ["tune", *(str(tape) if arg == "TAPE" else arg for arg in args)])
    assert isinstance(result.exception, InvalidParameter) and named in str(result.exception)
