"""Options that `manta simulate` refuses, and the words of the refusal."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from typer.testing import CliRunner

from cluster.cli import main as cli
from cluster.config.simulation_options import SimulationOptions
from cluster.lab.simulator.cost_model import MODELS
from engine.errors import InvalidParameter
from tests.models import make_model

FEW = ["--trace", "fixed", "--requests", "5"]


def refusal(*options: str) -> str:
    error = CliRunner().invoke(cli.app, ["simulate", *FEW, *options]).exception
    assert isinstance(error, InvalidParameter), error
    return str(error)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--ttft-ms -1", "--ttft-ms must be above 0 and finite, got -1.0"),
        ("--tpot-ms 0", "--tpot-ms must be above 0 and finite, got 0.0"),
        ("--ttft-ms nan", "--ttft-ms must be above 0 and finite, got nan"),
        ("--autoscale 2 --startup-s inf --replicas 1", "--startup-s must be finite, got inf"),
        (
            "--autoscale 2 --replicas 5",
            "--autoscale must be at least --replicas (5), the initial size of the pool, got 2",
        ),
        (
            "--autoscale 2 --replicas 1 --prefill-replicas 3",
            "--autoscale must be at least --prefill-replicas (3), the initial size of the pool, got 2",
        ),
        (
            "--plan --autoscale 4",
            "--autoscale must be left out with --plan, because planned clusters have a fixed size",
        ),
        (
            "--handoff auto",
            "--handoff must be always, because there is no prefill pool (--prefill-replicas), got 'auto'",
        ),
        (
            "--plan --prefill-replicas 1 --tensor-parallel-size 2 --max-gpus 3",
            "--max-gpus must be at least 4, the GPUs of the smallest cluster (--tensor-parallel-size 2), got 3",
        ),
        ("--tensor-parallel-size 3", "--tensor-parallel-size must be a divisor of the 32 heads of llama-3.1-8b, got 3"),
        ("--prefill-replicas 1 --network-gbit 0", "--network-gbit must be above 0 and finite, got 0.0"),
        (
            "--num-gpu-blocks-override 9",
            "--num-gpu-blocks-override must be at least 10, so that blocks of 64 tokens hold the longest request of "
            "--trace (576), got 9",
        ),
    ],
)
def test_an_option_is_refused_by_its_flag_with_value_and_limit(options, said):
    assert refusal(*options.split()) == said


def test_the_blocks_that_a_refusal_asks_for_are_enough():
    assert CliRunner().invoke(cli.app, ["simulate", *FEW, "--num-gpu-blocks-override", "10"]).exit_code == 0


def test_a_card_that_holds_too_little_kv_is_refused_by_what_would_help(tmp_path):
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 60000, "output_length": 5}\n' * 5)
    said = refusal("--trace", str(trace), "--card", "l4")
    assert said.startswith(
        "--tensor-parallel-size must be enough cards for the weights and the KV of the longest request"
    )
    assert "(60005 tokens; " in said and "fit on 1 l4), got 1" in said


def test_a_file_has_to_have_the_requests_that_are_asked_for(tmp_path):
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 100, "output_length": 5}\n' * 4)
    assert refusal("--trace", str(trace)) == "--requests must be at most 4, the requests of t, got 5"
    simulated = CliRunner().invoke(cli.app, ["simulate", "--trace", str(trace), "--json"])
    assert json.loads(simulated.stdout)["requests"] == 4, "all of a file that has fewer than the default"
    tuned = CliRunner().invoke(cli.app, ["tune", "--trace", str(trace), "--requests", "5"])
    assert str(tuned.exception) == refusal("--trace", str(trace))


def test_ranks_have_to_share_out_the_heads_of_a_model_folder(tmp_path):
    make_model(tmp_path, "qwen3")
    assert "--tensor-parallel-size must be a divisor of the" in refusal(
        "--model", str(tmp_path), "--tensor-parallel-size", "3"
    )


@pytest.mark.parametrize("name", MODELS)
def test_heads_are_those_that_the_size_of_the_kv_comes_from(name):
    model = MODELS[name]
    assert model.pair_flops / model.kv_bytes == model.heads / model.kv_heads


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{}", "missing required field `cost`"),
        ('{"cost": {"step_s": "much"}}', "`$.cost.step_s`"),
        ("no JSON", "malformed"),
    ],
)
def test_a_cost_file_of_another_kind_is_refused_by_flag_and_path(tmp_path, content, problem):
    path = tmp_path / "cost.json"
    path.write_text(content)
    said = refusal("--cost", str(path))
    assert (
        said.startswith("--cost must be a file written by `python -m benchmarks.simulator.fit` (")
        and str(path)[:20] in said
    )
    assert problem in said


def test_a_plan_says_that_two_pools_were_not_tried_and_what_tries_them():
    options = ["simulate", *FEW, "--plan"]
    said = CliRunner().invoke(cli.app, options).stdout
    assert "two pools: not tried; try them with --prefill-replicas 1" in said
    said = CliRunner().invoke(cli.app, [*options, "--prefill-replicas", "1"]).stdout
    assert "two pools: 1 prefill + 1 decode" in said
    said = (
        CliRunner().invoke(cli.app, [*options, "--prefill-replicas", "1", "--max-gpus", "2", "--tpot-ms", "1"]).stdout
    )
    assert "two pools: none is good enough" in said


def test_a_plan_chooses_the_layout_of_a_replica_and_says_why():
    options = ["simulate", *FEW, "--plan", "--model", "llama-3.1-70b"]
    said = " ".join(CliRunner().invoke(cli.app, options, env={"COLUMNS": "400"}).stdout.split())
    assert (
        "best: tensor_parallel_size 4: 32.9 GiB of weights per rank, 3840 KiB per token for sums inside a node" in said
    )
    assert "because on 2 ranks weights and KV do not fit" in said
    assert "one pool: 1 replica of 4 GPUs, 4 in all" in said
    assert "best:" not in CliRunner().invoke(cli.app, [*options, "--tensor-parallel-size", "8"]).stdout


def test_a_plan_names_a_layout_that_the_simulator_does_not_know():
    options = ["--plan", "--model", "llama-3.1-70b", "--card", "l4", "--cards-per-node", "4", "--network-gbit", "1"]
    result = CliRunner().invoke(cli.app, ["simulate", *FEW, *options, "--tpot-ms", "2000"], env={"COLUMNS": "400"})
    said = " ".join(result.stdout.split())
    assert "best: tensor_parallel_size 4, pipeline_parallel_size 2: " in said
    assert (
        "simulated: tensor_parallel_size 1, 2, 4, because the simulator knows neither stages nor sums between machines"
        in said
    )
    assert "tensor_parallel_size must be enough cards for 141 GB of weights" in str(result.exception)


def test_every_option_is_a_flag_with_a_help_text_and_its_default():
    shown = " ".join(CliRunner().invoke(cli.app, ["simulate", "--help"], env={"COLUMNS": "400"}).stdout.split())
    for field in fields(SimulationOptions):
        assert f"--{field.name.replace('_', '-')}" in shown, field.name
        assert field.metadata["help"].split(";")[0] in shown, field.name
