"""What pages show of a start of `manta serve` is what it prints."""

from __future__ import annotations

import html
import io
import json
import logging
import re
import shlex
from types import SimpleNamespace

import pytest
import yaml
from rich.console import Console

from cluster.cli.serve_terminal import ServeTerminal
from placement.console_log import JsonFormatter
from tests.docs.pages import block, page

RANK = "decode-pocket-a1/rank0"
START = [  # a start of the bundled model: seconds, process, and its line
    (5.5, "manta-serve", "Ray is up", ()),
    (8.3, "manta-serve", "proxies are up", ()),
    (8.3, "manta-serve", "Serve is up", ()),
    (9.6, RANK, "rank starts pid=%d", (17,)),
    (11.8, "ingress-x", "ingress ready startup_s=%.1f", (1.2,)),
    (11.8, RANK, "loading weights folder=%s read=%.2f", ("/m", 0.0)),
    (11.8, RANK, "weights loaded folder=%s", ("/m",)),
    (
        11.9,
        RANK,
        "kv cache: %d tokens fit (%d blocks of %d, %.2f GiB), limited by %s: %.1f requests of max_model_len %d",
        (262144, 16384, 16, 0.5, "max_num_seqs (128) x max_model_len (2048)", 128.0, 2048),
    ),
    (12.1, RANK, "warmed up seconds=%.1f", (0.3,)),
    (
        12.2,
        "ingress-x",
        "ready address=%s models=%s seconds=%.1f task=%s needs_key=%s",
        ("http://127.0.0.1:8000", "pocket", 6.7, "chat", False),
    ),
    (
        29.0,
        "ingress-x",
        "totals prompt_tokens_per_s=%.1f output_tokens_per_s=%.1f running=%d waiting=%d kv_use=%.3f hit_rate=%.3f",
        (1.2, 2.3, 0, 0, 0.0, 0.0),
    ),
]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> str:
    """What a terminal of 80 columns shows of START in the end."""
    clock = SimpleNamespace(now=0.0)
    time = SimpleNamespace(monotonic=lambda: 1000 + clock.now, strftime=lambda _: "16:16:54")
    monkeypatch.setattr("cluster.cli.serve_terminal.time", time)
    shown = io.StringIO()
    view = ServeTerminal(Console(file=shown, width=80), log_requests=False)
    for clock.now, who, message, values in START:
        view.line(JsonFormatter(who).format(logging.LogRecord("l", logging.INFO, "", 0, message, values, None)))
    return shown.getvalue()


def test_the_lines_of_a_start_begin_as_those_that_the_code_logs():
    folders = ("engine", "deployments", "cluster", "placement")
    code = "".join(file.read_text() for folder in folders for file in page(folder).rglob("*.py"))
    assert all(f'"{message}' in code for _, _, message, _ in START)


def test_the_page_of_the_console_shows_it(printed):
    shown = block("docs/console.md", "", with_="is ready after")
    assert shown == printed


def test_the_picture_of_readme_shows_it(printed):
    picture = re.sub(r"<[^>]*>", "", page("docs/images/start.svg").read_text()).replace("\n", "")
    squeeze = lambda text: re.sub(r"\s", "", text)  # noqa: E731
    box = printed.partition("16:16:54")[0]
    assert squeeze(box) in squeeze(html.unescape(picture))


def test_the_request_of_readme_is_for_the_model_of_make_serve():
    serve = re.search(r"^serve:.*\n\t\$\(BIN\)/manta serve (\S+)$", page("Makefile").read_text(), re.MULTILINE)
    assert serve is not None
    application = yaml.safe_load(page(serve[1]).read_text())["applications"][0]
    text = block("README.md", "bash", with_="make serve")
    *_, body = shlex.split(text[text.index("curl") :])
    assert json.loads(body)["model"] in [model["name"] for model in application["args"]["models"]]
