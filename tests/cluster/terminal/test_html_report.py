"""Reports of measurements, as files for a browser."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from cluster.cli.bench.charts import write_generation_report, write_serve_report
from cluster.cli.bench.load import ServeLoad
from cluster.cli.bench.openai_client import RequestResult
from cluster.cli.bench.serve import summarise
from cluster.cli.generate import Summary
from cluster.cli.main import app
from cluster.terminal.html_report import (
    Chart,
    distribution,
    nice_above,
    rate_over_time,
    steps_over_time,
    thinned,
    write_report,
)


def test_a_distribution_is_its_values_by_percentile():
    assert distribution("t", "ms", [30.0, 10.0, 20.0]).points == [(0, 10), (50, 20), (100, 30)]


def test_a_rate_over_time_adds_up_to_what_came():
    chart = rate_over_time("t", "tokens/s", [(0.0, 5.0), (3.0, 10.0), (6.0, 15.0)], 6.0)
    width = chart.points[1][0] - chart.points[0][0]
    assert sum(y * width for _, y in chart.points) == pytest.approx(30.0)
    assert [round(x, 1) for x, y in chart.points if y] == [0.1, 3.1, 6.0]


def test_a_number_of_replicas_stays_until_it_changes():
    points = steps_over_time("t", "replicas", [(0.0, 1), (5.0, 3)], 8.0).points
    assert points == [(0.0, 1), (0.0, 1), (5.0, 1), (5.0, 3), (8.0, 3)]


@pytest.mark.parametrize("points", [[], [(0.0, 0.0)], [(1.0, 3.0), (2.0, 1e6)]])
def test_any_curve_is_drawn_within_its_picture(points):
    svg = ElementTree.fromstring(Chart("t", "x", "y", points).svg())
    numbers = [float(n) for n in re.findall(r"[\d.]+", svg.find("polyline").attrib["points"])]
    assert all(0 <= number <= 560 for number in numbers)


def test_a_long_curve_keeps_its_end_and_no_more_points_than_can_be_seen():
    points = [(float(i), 0.0) for i in range(5001)]
    assert len(thinned(points)) <= 402
    assert thinned(points)[-1] == points[-1]


@pytest.mark.parametrize(
    ("value", "above"), [(0.0, 1.0), (0.3, 0.4), (1.0, 1.0), (7.9, 8.0), (9.0, 10.0), (130.0, 200.0)]
)
def test_an_axis_ends_at_a_short_number(value, above):
    assert nice_above(value) == pytest.approx(above)


def test_a_report_is_one_file_without_scripts_whose_names_are_text(tmp_path: Path):
    path = tmp_path / "report.html"
    write_report(path, "<script>alert(1)</script>", [("<b>", "a & b")], [distribution("<i>", "ms", [1.0, 2.0])])
    text = path.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "a &amp; b" in text
    assert not re.search(r"https?://|src=|url\(", text)


def test_a_simulation_writes_its_latencies_and_replicas_over_time(tmp_path: Path):
    path = tmp_path / "simulation.html"
    flags = ["--trace", "fixed", "--requests", "40", "--rate", "4", "--replicas", "1", "--autoscale", "2"]
    result = CliRunner().invoke(app, ["simulate", *flags, "--html", str(path)])
    assert result.exit_code == 0, result.output
    text = path.read_text(encoding="utf-8")
    for chart in ("Time to first token", "Output", "Replicas of decode"):
        assert f"<h2>{chart}" in text


def test_a_report_that_could_not_be_written_is_refused_before_anything_is_measured(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--trace", "fixed", "--requests", "40", "--rate", "4", "--replicas", "1"]
    result = CliRunner().invoke(app, ["simulate", *flags, "--html", "none/report.html"])
    assert result.exit_code == 2
    assert "none is not a folder" in result.output


def test_a_measured_server_has_its_latencies_and_throughput_over_time(tmp_path: Path):
    path = tmp_path / "serve.html"
    answered = RequestResult(sent_at=10.0, output_tokens=3, has_usage=True, ttft_s=0.5, itl_s=[0.25, 0.25], e2el_s=1.0)
    outcomes = [answered, RequestResult(sent_at=9.0, error="HTTP 500", e2el_s=0.1)]
    load = ServeLoad(num_prompts=2, input_len=4, output_len=3)
    write_serve_report(path, summarise(outcomes, 2.0, load, "http://host", "m", {}, 0.1))
    text = path.read_text(encoding="utf-8")
    for chart in ("Time to first token", "Time per output token", "Time to the end", "Output", "Answers"):
        assert f"<h2>{chart}" in text
    assert "<dd>1 requests in 2.0 s</dd>" in text
    assert "<dt>ttft, median and p99</dt><dd>500.0 and 500.0 ms</dd>" in text


def test_a_generation_writes_its_throughput_and_counts_failed_lines_apart_from_answers(tmp_path: Path):
    path = tmp_path / "generation.html"
    write_generation_report(path, Summary(0, 0, 3, 1, [(1.0, 10.0), (2.0, 30.0), (2.0, 0.0)]))
    text = path.read_text(encoding="utf-8")
    assert "<dt>output tokens/s</dt><dd>20.0</dd>" in text
    assert "<dt>answers</dt><dd>2; 1 failed</dd>" in text


def test_a_distribution_names_its_percentiles_and_counts_have_whole_numbers():
    assert distribution("latency", "ms", [1.0, 2.0]).labels == "P50 1.5 · P90 1.9 · P99 1.99"
    ticks = re.findall(r"<text[^>]*end[^>]*>([^<]*)<", steps_over_time("replicas", "replicas", [(0.0, 1.0)], 9.0).svg())
    assert ticks == ["0", "1", "2", "3", "4"]
