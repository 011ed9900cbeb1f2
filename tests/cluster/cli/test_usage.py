"""What the command says when it is used in a wrong way."""

from __future__ import annotations

import pytest

from cluster.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serve", "pocket", "--no-such"], "manta: No such option: --no-such; see manta serve --help"),
        (["serve", "pocket", "more"], "manta: Got unexpected extra argument(s) (more); see manta serve --help"),
        (["serve", "--dtype", "int4"], "manta: Invalid value for '--dtype'"),
        (["serve", "--port"], "manta: Option '--port' requires an argument; see manta --help"),
        (["generate", "--input", "/none"], "manta: "),
        (["nonsense"], "manta: No such command 'nonsense'; see manta --help"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_1(monkeypatch, capsys, arguments, line):
    monkeypatch.setattr("sys.argv", ["manta", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(line)


def test_without_a_command_there_is_the_help(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["manta"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.count("Try it in two terminals") == 1
