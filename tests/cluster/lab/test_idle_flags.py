"""No flag of `manta simulate` is ignored without a word: it changes the result, or is refused by name."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cluster.cli.simulate import simulate
from cluster.config.simulation_options import SimulationOptions
from engine.errors import InvalidParameter

APP = typer.Typer()  # of one command, which is read faster than `manta` with all of its commands
APP.command()(simulate)
COST = {"step_s": 0.01, "token_s": 1e-4, "sequence_s": 1e-3, "pair_s": 1e-9, "context_s": 1e-8}
PLAN = "--plan --ttft-ms 500 --tpot-ms 12 --max-gpus 4"
AMID = {  # other flags, which say what a flag can change
    "a file": "--trace FILE",
    "conversations": "--trace TALKS",
    "a name": "--trace shared-prefix --rate 100",
    "two pools": "--trace FILE --prefill-replicas 1",
    "a cost": "--trace FILE --cost COST",
    "an autoscaler": "--trace FILE --autoscale 6 --startup-s 0.2",
    "two autoscaled pools": "--trace FILE --autoscale 6 --startup-s 0.2 --prefill-replicas 2",
    "roles": "--trace FILE --prefill-replicas 2 --switch-roles",
    "tiers": "--trace FILE --num-gpu-blocks-override 40 --kv-offloading-disk-size 1 --kv-offloading-store-size 1",
    "a plan": f"--trace FILE {PLAN}",
    "a plan of one size": f"--trace FILE {PLAN} --tensor-parallel-size 2",
}
CHANCE = {  # what would change something in a longer simulation
    ("a cost", "--model opt-13b"): "all KV fits",
    ("a cost", "--card l4"): "all KV fits",
    ("an autoscaler", "--network-gbit 1"): "no request has moved",
    ("two autoscaled pools", "--switch-roles"): "no replica has changed its role",
    ("roles", "--autoscale 5"): "no replica has come up",
    ("a plan", "--network-gbit 1"): "it changes the layouts that are told, not those that are simulated",
}
VALUES = {  # of each flag, one that matters
    "trace": "fixed",
    "scale": "0.5",
    "max_active_conversations": "2",
    "requests": "9",
    "rate": "20",
    "burstiness": "0.1",
    "seed": "3",
    "replicas": "1",
    "prefill_replicas": "2",
    "router": "random",
    "handoff": "auto",
    "network_gbit": "1",
    "autoscale": "5",
    "move_requests": None,
    "switch_roles": None,
    "startup_s": "0.1",
    "model": "opt-13b",
    "card": "l4",
    "tensor_parallel_size": "4",
    "cards_per_node": "2",
    "cost": "COST",
    "num_gpu_blocks_override": "30",
    "kv_offloading_size": "1",
    "kv_offloading_disk_size": "1",
    "kv_offloading_store_size": "1",
    "disk_gbit": "0.1",
    "store_gbit": "0.1",
    "block_size": "1024",
    "max_num_batched_tokens": "256",
    "max_num_seqs": "2",
    "prefix_caching": None,
    "ttft_ms": "1",
    "tpot_ms": "1",
    "good": "0.01",
    "engine_hour": "1",
    "gpu_hour": "1",
    "kv_gib_hour": "1",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    lines = [
        {"timestamp": 5 * i, "input_length": 1100, "output_length": 20, "hash_ids": [i % 7, 7 + i % 11, 100 + i]}
        for i in range(16)
    ]
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    turns = [{"session_id": str(i % 5), "input_length": 1100 + i, "output_length": 20, "delay": i} for i in range(16)]
    (folder / "talks.jsonl").write_text("\n".join(map(json.dumps, turns)))
    (folder / "cost.json").write_text(json.dumps({"cost": COST}))
    return {"FILE": folder / "t.jsonl", "TALKS": folder / "talks.jsonl", "COST": folder / "cost.json"}


def simulated(options: str, files: dict[str, Path]) -> Any:
    """Return the figures, or the name of the flag that is refused."""
    command = [str(files.get(word, word)) for word in options.split()]
    result = CliRunner().invoke(APP, ["--requests", "16", *command, "--json"])
    if isinstance(result.exception, InvalidParameter):
        return result.exception.field
    assert result.stdout, result.exception
    return without_time(json.loads(result.stdout))


def without_time(figures: Any) -> Any:
    if isinstance(figures, list):
        return [without_time(each) for each in figures]
    if isinstance(figures, dict):
        return {name: without_time(value) for name, value in figures.items() if name not in ("took_s", "trace")}
    return figures


def test_each_flag_is_tried():
    assert list(VALUES) == [each.name for each in fields(SimulationOptions)]


@pytest.mark.parametrize("amid", AMID)
def test_a_flag_changes_something_or_is_refused(amid, files):
    plain, ignored = simulated(AMID[amid], files), []
    for name, value in VALUES.items():
        flag = f"--{name.replace('_', '-')}"
        if flag in AMID[amid].split() and name not in ("trace",):
            continue
        given = f"{flag} {value}" if value else flag if name == "switch_roles" else flag.replace("--", "--no-", 1)
        found = simulated(f"{AMID[amid]} {given}", files)
        if found == plain:
            ignored.append(given)
    assert ignored == [given for where, given in CHANCE if where == amid]
