"""`manta replay` on the tape of a real engine."""

from __future__ import annotations

import json
import random

import msgspec
import pytest
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.lab.explorer.explore import is_of
from cluster.lab.recorded.metered_replay import MeteredReplay
from deployments.parts.tape.choice_log import ChoiceLog
from deployments.parts.tape.choice_record import RouterTape
from deployments.routing.balancer import Balancer
from deployments.routing.config import RoutingConfig
from deployments.routing.prompt_digest import PromptDigest
from engine.core.prompt_budget import PromptBudget
from engine.errors import InvalidParameter
from engine.parts.tape.engine_tape import EngineTape, Segment
from engine.parts.tape.file import pack_tapes, read_file, read_tapes
from engine.parts.tape.recorder import code_version
from tests.cluster.lab.recorded.taped_engine import record


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return record(tmp_path_factory.mktemp("tapes"), "engine-1")


def run(*args: object, stdin: str = "") -> str:
    result = CliRunner().invoke(app, ["replay", *map(str, args)], input=stdin, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.exception or result.output
    return result.output


def test_every_plan_is_equal_and_the_command_counts_them(file):
    (found,) = json.loads(run(file, "--json"))
    assert found["engine_id"] == "engine-1" and found["requests"] == 8
    assert found["equal"] == found["plans"] > 40 and not found["differs"]
    assert "engine-1" in run(file)


def test_another_scheduler_ends_with_exit_code_1_and_names_the_first_plan_that_differs(file, monkeypatch):
    monkeypatch.setattr(PromptBudget, "tokens", lambda self, left: min(left, 3))
    result = CliRunner().invoke(app, ["replay", str(file)])
    assert result.exit_code == 1
    assert "at #1 (" in result.output and "the plan is another one" in result.output
    result = CliRunner().invoke(app, ["replay", str(file), "--at", "#20"])
    assert isinstance(result.exception, InvalidParameter) and "the plan is another one" in str(result.exception)


def test_one_request_is_followed_from_its_arrival_to_its_end(file):
    lines = run(file, "--request", "r5").splitlines()
    assert lines[0] == "r5 in engine-1:" and "waiting: 0 of 10 tokens computed" in lines[2]
    assert any("running" in line and "8 were cached" in line for line in lines)
    assert "finished" in lines[-1] and "15 output tokens" in lines[-1]
    result = CliRunner().invoke(app, ["replay", str(file), "--request", "nobody"])
    assert result.exit_code != 0


def test_the_scheduler_is_shown_at_a_number_and_at_a_time(file):
    shown = run(file, "--at", "#20")
    assert (
        shown.startswith("#20 of ") and "running: 3" in shown and "waiting: " in shown and "blocks of group 0" in shown
    )
    assert "the start of the tape" in run(file, "--at", "-1")
    assert CliRunner().invoke(app, ["replay", str(file), "--at", "noon"]).exit_code != 0


def test_one_goes_forward_and_back_by_commands(file):
    shown = run(file, "--step", stdin="n 9\n\nb 2\n# 4\nr r2\nt 0\nnonsense\nq\nn\n")
    positions = [line.split()[0] for line in shown.splitlines() if line.startswith("#") and " of " in line]
    assert positions[:5] == ["#0", "#9", "#10", "#8", "#4"] and len(positions) == 7
    assert "'nonsense' is no command" in shown


def test_what_other_options_would_have_done_comes_with_the_error_of_the_simulation(file):
    found = json.loads(run(file, "--set", "max_num_seqs=8", "--json"))
    assert set(found["ttft_p50_s"]) == {"name", "recorded", "simulated", "changed", "error", "is_known"}
    assert found["ttft_p50_s"]["changed"] < found["ttft_p50_s"]["simulated"], "no request waits for a slot"
    assert found["cached"]["recorded"] > 0 and found["cached"]["error"] < 0.5
    table = run(file, "--set", "max_num_seqs=8")
    assert "8 requests in 1 engines" in table


def test_recorded_time_costs_what_the_engine_itself_has_charged(file):
    (found,) = json.loads(run(file, "--engine-hour", "3.6", "--json"))
    costs, charged = found["costs"], json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
    assert costs["per_hour"] == pytest.approx(3.6)
    assert costs["per_request"] == pytest.approx(found["seconds"] * 0.001 / 8)
    used = found["seconds"] * (1 - sum(costs["wasted"].values()))
    assert charged["requests"] < used < charged["requests"] + charged["overhead"], "planning is not told apart"
    assert "cost per million tokens out" in run(file, "--engine-hour", "3.6")
    assert "cost" not in run(file)


def test_what_if_speaks_of_money_if_there_are_prices(file):
    found = json.loads(run(file, "--set", "max_num_seqs=8", "--engine-hour", "3.6", "--json"))
    assert found["cost_per_hour"]["recorded"] == pytest.approx(3.6)
    assert found["cost_per_hour"]["simulated"] == pytest.approx(3.6)
    assert 0 < found["cost_per_request"]["changed"] < found["cost_per_request"]["simulated"], "the run ends earlier"
    assert "wasted_idle" in found and "cost_per_million_output_tokens" in found
    assert "cost_per_hour" not in json.loads(run(file, "--set", "max_num_seqs=8", "--json"))
    twice = json.loads(run(file, "--set", "decode.num_replicas=2", "--engine-hour", "3.6", "--json"))
    assert twice["cost_per_hour"]["changed"] == pytest.approx(7.2)


@pytest.mark.parametrize(
    "setting",
    ["max_num_seqs", "max_num_seqs=x", "nothing=3", "routing.policy=best", "enable_prefix_caching=1",
     "decode.num_replicas=0", "handoff.policy=never", "num_gpu_blocks_override=2"],
)  # fmt: skip
def test_an_unknown_setting_is_refused(file, setting):
    assert CliRunner().invoke(app, ["replay", str(file), "--set", setting]).exit_code != 0


def test_the_tapes_of_two_engines_are_one_load(file, tmp_path):
    other = record(tmp_path, "engine-2")
    assert [each["engine_id"] for each in json.loads(run(file, other, "--json"))] == ["engine-1", "engine-2"]
    table = run(file, other, "--set", "decode.num_replicas=1")
    assert "16 requests in 2 engines" in table
    result = CliRunner().invoke(app, ["replay", str(file), str(file)])
    assert isinstance(result.exception, InvalidParameter) and "two are of engine-1" in str(result.exception)


def test_a_file_that_is_no_tape_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"no tape")
    result = CliRunner().invoke(app, ["replay", str(tmp_path / "x")])
    assert result.exit_code != 0 and "manta tape save" in str(result.exception)


@pytest.fixture
def routed(file, tmp_path):
    """The same engine, with the router that chose it among two for the request r5."""
    log = ChoiceLog(2**20)
    balancer = Balancer(RoutingConfig(), "decode", 4, random.Random(0))
    balancer.use_observer(log)
    for name in ("r4", "r5"):
        balancer.choose(PromptDigest(name, 10, [1, 2]), ["engine-1", "engine-2"])
    path = tmp_path / "routed.tape"
    path.write_bytes(pack_tapes(read_file(file).engines, log.take("ingress-1")))
    return path


def test_routers_choose_again_and_a_request_shows_why_its_engine_was_chosen(routed, monkeypatch):
    router = json.loads(run(routed, "--json"))[-1]
    assert (router["router"], router["choices"], router["equal"]) == ("ingress-1", 2, 2)
    assert "2 of 2" in run(routed)
    lines = run(routed, "--request", "r5").splitlines()
    assert "the router of ingress-1 to the decode pool: r5, a prompt of 10 tokens, to engine-" in lines[0]
    assert "chosen again: equal" in lines and "r5 in engine-1:" in lines
    monkeypatch.setattr("deployments.routing.policies.PrefixAware.rank", lambda *args: (["engine-3"], "no_prefix"))
    result = CliRunner().invoke(app, ["replay", str(routed)])
    assert result.exit_code == 1 and "ingress-1 to decode: r4 at" in result.output


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("chatcmpl-1", True),
        ("chatcmpl-1-5d0c1f2e-0", True),
        ("chatcmpl-1-5d0c1f2e-0.2", True),
        ("chatcmpl-1-5d0c1f2e-0.2/7f.12", True),
        ("chatcmpl-11", False),
        ("chatcmpl", False),
    ],
)
def test_a_request_has_sequences_attempts_and_handoffs(name, found):
    assert is_of(name, "chatcmpl-1") == found


@pytest.fixture
def of_another_version(file, tmp_path, monkeypatch):
    """A tape whose replay ends in an error of Python, as one of another version may."""
    monkeypatch.setattr(MeteredReplay, "_charge", lambda self, moment: self.nothing)
    (tape,) = read_tapes(file)
    path = tmp_path / "old.tape"
    path.write_bytes(pack_tapes([msgspec.msgpack.encode(msgspec.structs.replace(tape, version="manta 0.1"))]))
    return path


def test_a_tape_of_another_version_is_refused_with_both_versions(of_another_version, tmp_path):
    result = CliRunner().invoke(app, ["replay", str(of_another_version), "--json"])
    (found,) = json.loads(result.output)
    commands = (
        ["replay", of_another_version, "--set", "max_num_seqs=8"],
        ["tune", "--tape", of_another_version],
        ["bench", "serve", "--trace", of_another_version, "--model", "m"],
    )
    refused = [CliRunner().invoke(app, [*map(str, command)]).exception for command in commands]
    for told in (found["problem"], *map(str, refused)):
        assert f"another version (manta 0.1; this is {code_version()})" in told and "AttributeError" in told
    assert result.exit_code == 1 and all(isinstance(error, InvalidParameter) for error in refused)


def test_an_error_of_this_version_names_no_other(of_another_version, file):
    result = CliRunner().invoke(app, ["replay", str(file), "--set", "max_num_seqs=8"])
    assert isinstance(result.exception, InvalidParameter), "a damaged tape can fail in any way"
    assert "AttributeError" in str(result.exception) and "another version" not in str(result.exception)


def test_a_tape_that_was_made_to_do_harm_shows_its_texts_and_moves_no_cursor(tmp_path):
    tape = EngineTape(
        engine_id="e\x1b[2J", version="v\x1b]52;c;eA==\x07", wall_s=0, role="\x9b31m", reason="\x1bc",
        segments=[Segment(0.0, b"cos\nsystem\n(S'true'\ntR.", b"", b"")],
    )  # fmt: skip
    (path := tmp_path / "evil.tape").write_bytes(pack_tapes([msgspec.msgpack.encode(tape)]))
    for options in ([], ["--at", "1"], ["--request", "r"], ["--set", "max_num_seqs=8"]):
        result = CliRunner().invoke(app, ["replay", str(path), *options], env={"COLUMNS": "200"})
        assert result.exit_code == 1 and not set("\x1b\x07\x9b") & set(result.output)
        assert result.exception is None or isinstance(result.exception, SystemExit | InvalidParameter)


def test_a_router_of_another_version_is_refused(file, tmp_path):
    (tmp_path / "old.tape").write_bytes(pack_tapes(read_file(file).engines, [msgspec.msgpack.encode({"router": "i"})]))
    for command in (["replay"], ["tune", "--tape"]):
        result = CliRunner().invoke(app, [*command, str(tmp_path / "old.tape")])
        assert isinstance(result.exception, InvalidParameter) and "manta tape save" in str(result.exception)


def test_choices_of_another_version_differ(routed, tmp_path):
    tapes = read_file(routed)
    router = msgspec.structs.replace(msgspec.msgpack.decode(tapes.routers[0], type=RouterTape), choices=[b"\x90"])
    (tmp_path / "old.tape").write_bytes(pack_tapes(tapes.engines, [msgspec.msgpack.encode(router)]))
    result = CliRunner().invoke(app, ["replay", str(tmp_path / "old.tape")], env={"COLUMNS": "200"})
    assert result.exit_code == 1 and "the choices cannot be read by this version" in result.output
