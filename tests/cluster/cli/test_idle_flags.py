"""Flags that would be ignored because of others are refused by name, before anything is measured or read.

`manta simulate` has a test of its own (tests/cluster/lab/test_idle_flags.py), which tries all of its flags.
"""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app
from engine.errors import InvalidParameter

IGNORED = {
    "bench offline --workload W1": {
        "--requests 3": "with --workload, which sets it",
        "--input-len 3": "with --workload, which sets it",
        "--output-len 3": "with --workload, which sets it",
        "--seed 3": "with --workload, which sets it",
    },
    "bench serve": {
        "--burstiness 0.5": "without --request-rate: all requests are sent at once",
        "--prefix-groups 3": "without --prefix-len",
        "--scale 0.5": "without --trace",
        "--time-scale 0.5": "without --trace",
        "--max-active-conversations 3": "without --trace",
    },
    "bench serve --trace agents": {"--input-len 3": "with --trace, which tells it"},
    "bench serve --text": {"--vocab-size 300": "with --text or --endpoint chat, which send words"},
    "bench serve --endpoint chat": {"--vocab-size 300": "with --text or --endpoint chat, which send words"},
    "bench serve --trace FILE": {
        "--num-prompts 3": "with --trace, which tells it",
        "--burstiness 0.5": "with --trace, which tells it",
        "--input-len 3": "with --trace, which tells it",
        "--output-len 3": "with --trace, which tells it",
        "--prefix-len 3": "with --trace, which tells it",
        "--prefix-groups 3": "with --trace, which tells it",
        "--text": "with --trace, which tells it",
        "--endpoint chat": "with --trace, which tells it",
    },
    "replay FILE": {"--engine e": "without --request, --at or --step: all engines are compared"},
    "replay FILE --request r": {
        "--at 1": "with --request",
        "--step": "with --request",
        "--json": "with --request, --at or --step, which show steps of a scheduler",
    },
    "replay FILE --at 1": {
        "--step": "with --at",
        "--engine-hour 1": "with --request, --at or --step, which show steps of a scheduler",
        "--kv-gib-hour 1": "with --request, --at or --step, which show steps of a scheduler",
    },
    "replay FILE --step": {"--json": "with --request, --at or --step, which show steps of a scheduler"},
    "replay FILE --set max_num_seqs=1": {
        "--engine e": "with --set, which simulates all engines",
        "--request r": "with --set, which simulates all engines",
        "--at 1": "with --set, which simulates all engines",
        "--step": "with --set, which simulates all engines",
    },
    "tape check": {"--metrics-port 9464": "without --every: one look ends at once"},
    "tune --trace fixed": {
        "--autoscale 3": "because `manta tune` compares clusters of fixed sizes",
        "--switch-roles": "because `manta tune` compares clusters of fixed sizes",
        "--startup-s 3": "because `manta tune` compares clusters of fixed sizes",
        "--no-move-requests": "because `manta tune` compares clusters of fixed sizes",
        "--cards-per-node 3": "because `manta tune` does not change the cards of a replica",
        "--good 0.5": "without --objective cost",
        "--disk-gbit 3": "without --kv-offloading-disk-size",
        "--store-gbit 3": "without --kv-offloading-store-size",
    },
    "tune --tape FILE": {
        "--burstiness 0.5": "with --tape, which tells it",
        "--seed 3": "with --tape, which tells it",
        "--replicas 3": "with --tape, which tells it",
        "--card l4": "with --tape, which tells it",
    },
    "tune --tape FILE --trace FILE": {
        "--seed 3": "with --tape, unless --trace is drawn",
        "--max-num-seqs 3": "with --tape, which tells it",
    },
    "simulate --trace fixed": {
        "--max-gpus 3": "without --plan",
        "--good 0.5": "without --plan",
        "--startup-s 3": "without --autoscale, which starts replicas",
        "--no-move-requests": "unless --autoscale may end replicas of a single pool",
        "--network-gbit 3": "for one pool, if no requests move between its replicas",
        "--cards-per-node 3": "unless --plan chooses the cards of a replica, which it does without "
        "--tensor-parallel-size or --cost",
    },
    "simulate --trace fixed --plan": {
        "--replicas 3": "with --plan, which searches it",
        "--autoscale 3": "with --plan, because planned clusters have a fixed size",
        "--switch-roles": "with --plan, because planned clusters have a fixed split",
        "--html report.html": "with --plan, which has no single run to show",
    },
}


@pytest.mark.parametrize(
    ("command", "flag", "when"),
    [(command, flag, when) for command, flags in IGNORED.items() for flag, when in flags.items()],
)
def test_a_flag_that_would_be_ignored_is_refused_by_name_with_the_reason(command, flag, when, tmp_path):
    (tmp_path / "FILE").write_text('{"timestamp": 0, "input_length": 5, "output_length": 1}')
    words = f"{command} {flag}".replace("FILE", str(tmp_path / "FILE")).split()
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, InvalidParameter), error
    assert (error.field, str(error)) == (flag.split()[0], f"{flag.split()[0]} must be left out {when}")


def test_of_several_flags_that_would_be_ignored_the_first_of_the_help_is_named(tmp_path):
    (tmp_path / "FILE").touch()
    flags = ["--replicas", "--router", "--card", "--block-size", "--max-num-seqs", "--engine-hour", "--kv-gib-hour"]
    values = dict.fromkeys(flags, "3") | {"--router": "random", "--card": "l4"}
    for first in range(len(flags)):
        words = [word for flag in reversed(flags[first:]) for word in (flag, values[flag])]
        error = CliRunner().invoke(app, ["tune", "--tape", str(tmp_path / "FILE"), *words]).exception
        assert isinstance(error, InvalidParameter), error
        assert error.field == flags[first]
