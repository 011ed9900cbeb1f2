"""`manta tape save` against a server of the API."""

from __future__ import annotations

from typer.testing import CliRunner

from cluster.cli.main import app
from engine.core.tape.file import pack_tapes, read_tapes


def test_the_tapes_of_a_server_are_written_to_a_file(server, tmp_path):
    url, answers = server
    answers["/debug/tape"] = 200, pack_tapes([])
    result = CliRunner().invoke(app, ["tape", "save", str(tmp_path / "a.tape"), "--url", url])
    assert result.exit_code == 0, result.exception
    assert read_tapes(tmp_path / "a.tape") == []
    assert CliRunner().invoke(app, ["replay", str(tmp_path / "a.tape")]).exit_code != 0, "there is nothing to replay"
