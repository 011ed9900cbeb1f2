"""`manta tape save` and `manta tape check` against a server of the API."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from cluster.cli.bench.openai_client import fetch
from cluster.cli.main import app
from cluster.lab.recorded.simulation_check import SimulationCheck
from engine.parts.tape.file import pack_tapes, read_tapes
from tests.cluster.lab.recorded.taped_engine import record


def test_the_tapes_of_a_server_are_written_to_a_file(server, tmp_path):
    url, answers = server
    answers["/debug/tape"] = 200, pack_tapes([])
    result = CliRunner().invoke(app, ["tape", "save", str(tmp_path / "a.tape"), "--url", url])
    assert result.exit_code == 0, result.exception
    assert read_tapes(tmp_path / "a.tape") == []
    assert CliRunner().invoke(app, ["replay", str(tmp_path / "a.tape")]).exit_code != 0, "there is nothing to replay"


def test_the_simulator_is_compared_with_what_a_server_has_just_done(server, tmp_path):
    url, answers = server
    answers["/debug/tape"] = 200, record(tmp_path, "engine-1").read_bytes()
    result = CliRunner().invoke(app, ["tape", "check", "--url", url, "--json"])
    assert result.exit_code == 0, result.exception
    found = json.loads(result.output)
    assert found["cached"]["recorded"] > 0 and found["ttft_p50_s"]["error"] < 1
    table = CliRunner().invoke(app, ["tape", "check", "--url", url], env={"COLUMNS": "200"}).output
    assert "8 requests in 1 engines" in table and "time to first token p50, ms" in table


def test_the_comparison_is_a_metric_and_goes_on_when_the_server_is_away(server, tmp_path, capsys):
    url, answers = server
    answers["/debug/tape"] = 503, b""
    slept = list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            raise KeyboardInterrupt
        answers["/debug/tape"] = 200, record(tmp_path, "engine-1").read_bytes()

    check = SimulationCheck(lambda: fetch(url, "/debug/tape", None), sleep)
    with pytest.raises(KeyboardInterrupt):
        check.run(600.0, None, as_json=True)
    told = capsys.readouterr()
    assert slept == [600.0, 600.0] and "answers 503" in told.err
    cached = json.loads(told.out)["cached"]
    ratio = check.registry.get_sample_value("manta_simulation_ratio", {"figure": "cached"})
    assert ratio == pytest.approx(cached["recorded"] / cached["simulated"])
