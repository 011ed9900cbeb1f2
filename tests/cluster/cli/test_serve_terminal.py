"""What `manta serve` shows on a terminal."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from cluster.cli.sample_request import curl
from cluster.cli.serve_terminal import ServeTerminal
from placement.console_log import PACKAGES, JsonFormatter


@pytest.fixture(autouse=True)
def own_loggers() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in (*PACKAGES, "ray", "ray.serve")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return io.StringIO()


def terminal(shown: io.StringIO, *, log_requests: bool = False, width: int = 100) -> ServeTerminal:
    return ServeTerminal(Console(file=shown, width=width), log_requests=log_requests)


def record(message: str, *args: object, level: int = logging.INFO, who: str = "ingress-x") -> str:
    """A line as processes of the cluster write it."""
    made = logging.LogRecord("deployments.ingress", level, "", 0, message, args, None)
    return JsonFormatter(who).format(made)


def ready(models: str, *, task: str = "chat", needs_key: bool = False) -> str:
    values = ("http://127.0.0.1:8000", models, 3.0, task, needs_key)
    return record("ready address=%s models=%s seconds=%.1f task=%s needs_key=%s", *values)


def progress(view: ServeTerminal) -> list[str]:
    """The lines that the terminal shows while the server starts, without their seconds."""
    console = Console(file=io.StringIO(), width=100)
    console.print(view._progress())
    assert isinstance(console.file, io.StringIO)
    text = re.sub(r"[\u2800-\u28ff]", "…", re.sub(r"\d+\.\d s", "", console.file.getvalue()))
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_start_ends_with_a_box_that_says_where_and_how_to_stop(shown):
    with terminal(shown) as view:
        for message in ("Ray is up", "Serve is up", "proxies are up", "ingress ready"):
            view.line(record(message))
        view.line(record("kv cache: %d tokens fit", 4096))
        view.line(ready("a,b"))
    text = shown.getvalue()
    for part in ("is ready after", "http://127.0.0.1:8000/v1", "a, b", "4096 tokens fit", "Ctrl-C", view.log_path):
        assert part in text


def test_the_box_fits_80_columns_with_nothing_cut(shown):
    what = "262144 tokens fit (16384 blocks of 16, 0.50 GiB), limited by max_num_seqs (128) x max_model_len (2048)"
    with terminal(shown, width=80) as view:
        for message in ("Ray is up", "Serve is up", "proxies are up", "ingress ready"):
            view.line(record(message))
        for message in ("rank starts", "loading weights", "weights loaded", "warmed up", f"kv cache: {what}"):
            view.line(record(message, who="decode-default-a1/rank0"))
        view.line(ready("default"))
    lines = shown.getvalue().splitlines()[1:]  # after the path of the log
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).replace("│", " ").split())
    parts = [f"{phase} 0.0 s" for phase in ("Ray", "Serve and its proxy", "ingress", "engines", "weights", "warm-up")]
    for part in (what, f"start {', '.join(parts)}", "stop Ctrl-C"):
        assert part in text


def test_below_the_box_is_a_command_that_asks_the_first_model(shown):
    with terminal(shown) as view:
        view.line(ready("qwen3-8b,b", needs_key=True))
    command = shown.getvalue().partition("In another terminal:\n")[2].rstrip("\n")
    assert command == curl("http://127.0.0.1:8000", "qwen3-8b", "chat", needs_key=True)


def test_each_pool_has_a_line_of_what_fits(shown):
    with terminal(shown) as view:
        for name, tokens in (("decode-small-a1", 512), ("decode-large-b2", 64), ("decode-large-c3", 64)):
            view.line(record("kv cache: %d tokens fit", tokens, who=f"{name}/rank0"))
        view.line(ready("small,large"))
    text = shown.getvalue()
    for pool in ("decode-small: 512 tokens fit", "decode-large: 64 tokens fit"):
        assert text.count(pool) == 1


def test_the_weights_have_a_bar_as_long_as_the_rank_that_has_read_least(shown):
    ranks = ("decode-m-a1/rank0", "decode-m-b2/rank0")
    with terminal(shown) as view:
        for message in ("Ray is up", "Serve is up", "proxies are up", "ingress ready"):
            view.line(record(message))
        for rank in ranks:
            view.line(record("rank starts pid=%d", 1, who=rank))
        for read, rank in zip((0.9, 0.5), ranks, strict=True):
            view.line(record("loading weights folder=%s read=%.2f", "/m", read, who=rank))
        assert progress(view)[3:] == ["✓ engines", "… weights " + "━" * 15]
        view.line(record("weights loaded folder=%s", "/m", who=ranks[0]))
        assert progress(view)[4:] == ["… weights " + "━" * 15, "… warm-up"], "the other rank still reads"
        view.line(record("weights loaded folder=%s", "/m", who=ranks[1]))
        for rank in ranks:
            view.line(record("warmed up seconds=%.1f", 1.0, who=rank))
        assert progress(view)[3:] == ["✓ engines", "✓ weights", "✓ warm-up"]


def test_what_ray_and_other_libraries_write_goes_to_the_named_file_alone(shown):
    with terminal(shown) as view:
        view.line("(raylet) [bold]a line of Ray's[/bold]")
        view.line(msgspec.json.encode(["no object"]).decode())
        logging.getLogger("ray").warning("of the driver")
    log = Path(view.log_path).read_text(encoding="utf-8")
    for part in ("a line of Ray's", "no object", "of the driver"):
        assert part in log
        assert part not in shown.getvalue()
    assert view.log_path in shown.getvalue()


def test_totals_warnings_and_errors_are_shown_and_other_lines_are_not(shown):
    values = (12.0, 34.0, 2, 1, 0.5, 0.25)
    with terminal(shown) as view:
        view.line(record(
            "totals prompt_tokens_per_s=%.1f output_tokens_per_s=%.1f running=%d waiting=%d kv_use=%.3f hit_rate=%.3f",
            *values,
        ))  # fmt: skip
        view.line(record("a [red]warning[/red]", level=logging.WARNING))
        view.line(record("an error", level=logging.ERROR))
        view.line(record("something else"))
    text = shown.getvalue()
    assert "in 12, out 34 tokens/s, running 2, waiting 1, KV 50 %, prefix hits 25 %" in text
    assert "ingress-x: a [red]warning[/red]" in text
    assert "ingress-x: an error" in text
    assert "something else" not in text


@pytest.mark.parametrize("log_requests", [False, True])
def test_requests_are_shown_one_by_one_only_if_asked_for(shown, log_requests):
    with terminal(shown, log_requests=log_requests) as view:
        view.line(record("request ended request_id=%s", "r-1"))
    assert ("r-1" in shown.getvalue()) == log_requests


def test_lines_of_the_command_itself_count_like_those_of_its_cluster(shown):
    with terminal(shown) as view:
        logging.getLogger("deployments.ray_driver").warning("of %s", "our own")
    assert "manta-serve: of our own" in shown.getvalue()
    assert "of our own" in Path(view.log_path).read_text(encoding="utf-8")


def test_the_log_keeps_the_traceback_of_an_error(shown):
    with terminal(shown) as view:
        view.line(msgspec.json.encode({"message": "failed", "process": "p", "exception": "Traceback: a bug"}).decode())
    assert "failed\nTraceback: a bug\n" in Path(view.log_path).read_text(encoding="utf-8")


def test_the_end_says_what_it_waits_for(shown):
    view = ServeTerminal(Console(file=shown, width=200, force_terminal=True), log_requests=False)
    with view:
        view.stopping({"ingress": 1, "decode-m": 2})
        view._live.refresh()
    assert "Waiting for ingress, decode-m (2)" in shown.getvalue()


def test_nothing_is_shown_and_nothing_fails_once_it_has_ended(shown, capsys):
    view = ServeTerminal(Console(file=shown, width=200, force_terminal=True), log_requests=False)
    with view:
        pass
    ended = shown.getvalue()
    view.stopping({"ingress": 1})
    logging.getLogger("ray").warning("late")
    assert shown.getvalue() == ended
    assert capsys.readouterr().err == ""


def test_a_second_ingress_of_the_same_models_has_no_box(shown):
    with terminal(shown) as view:
        for models in ("a", "a", "b"):
            view.line(ready(models))
    assert shown.getvalue().count("is ready after") == 2
