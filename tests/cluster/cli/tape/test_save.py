"""`manta tape save` against a server of the API."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.cli.tape.fetch import fetch
from engine.core.tape.file import pack_tapes, read_tapes
from engine.errors import EngineUnavailable, InvalidApiKey, NotPermitted, RequestError


def test_the_tapes_of_a_server_are_written_to_a_file(server, tmp_path):
    url, answers = server
    answers["/debug/tape"] = 200, pack_tapes([])
    result = CliRunner().invoke(app, ["tape", "save", str(tmp_path / "a.tape"), "--url", url])
    assert result.exit_code == 0, result.exception
    assert read_tapes(tmp_path / "a.tape") == []
    assert CliRunner().invoke(app, ["replay", str(tmp_path / "a.tape")]).exit_code != 0, "there is nothing to replay"


@pytest.mark.parametrize(
    ("status", "body", "error", "message"),
    [
        (401, b'{"error": {"message": "who are you?"}}', InvalidApiKey, "who are you?"),
        (403, b'{"error": {"message": "only keys of ingress.admin_keys"}}', NotPermitted, "admin_keys"),
        (404, b'{"detail": "Not Found"}', RequestError, "is not a Manta server"),
        (503, b"", EngineUnavailable, "answers 503"),
    ],
)
def test_what_a_server_answers_in_place_of_a_tape_is_one_clear_error(server, status, body, error, message):
    url, answers = server
    answers["/debug/tape"] = status, body
    with pytest.raises(error, match=message):
        fetch(url, None)
