"""`manta bench serve` on the load of a tape."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app
from tests.cluster.cli.bench.fake_openai_server import FakeOpenAIServer
from tests.cluster.lab.recorded.taped_engine import record


def test_the_arrivals_of_a_tape_are_sent_again_at_another_rate(tmp_path):
    tape = record(tmp_path, "engine-1")
    with closing(FakeOpenAIServer()) as server:
        trace = ("--trace", str(tape), "--request-rate", "80", "--num-warmups", "2")
        result = CliRunner().invoke(app, ["bench", "serve", "--base-url", server.url, "--json", *trace])
        assert result.exit_code == 0, result.output
        sent = [body["prompt"] for _, body in server.requests[2:]]
    fields = json.loads(result.stdout)
    assert (fields["completed"], fields["total_output_tokens"]) == (8, 8 * 15)
    assert fields["request_rate"] == pytest.approx(80)
    assert len(sent) == 8 and {len(prompt) for prompt in sent} == {10} and len({tuple(p[:8]) for p in sent}) == 1
