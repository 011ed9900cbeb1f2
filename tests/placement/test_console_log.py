from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from placement.console_log import PACKAGES, LogConfig, log_to_console

logger = logging.getLogger("engine.test")


@pytest.fixture(autouse=True)
def own_loggers() -> Iterator[None]:
    """Other tests see the log as it was."""
    loggers = [logging.getLogger(package) for package in PACKAGES]
    before = [(one.level, one.handlers, one.propagate) for one in loggers]
    yield
    for one, (one.level, one.handlers, one.propagate) in zip(loggers, before, strict=True):
        one.setLevel(one.level)  # forgets what it knows of its children


def test_json_line_has_the_named_values_of_its_message_as_keys(capfd):
    log_to_console("decode-1/rank0", LogConfig(format="json"))
    logger.info("preempted request_id=%s tokens=%d share=%.2f %d %% of all", "cmpl-1", 5, 0.25, 9)
    line = json.loads(capfd.readouterr().err)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "process": "decode-1/rank0",
        "logger": "engine.test",
        "message": "preempted request_id=cmpl-1 tokens=5 share=0.25 9 % of all",
        "request_id": "cmpl-1",
        "tokens": 5,
        "share": 0.25,
    }


def test_what_a_client_puts_into_its_request_id_forges_no_key_and_no_line(capfd):
    log_to_console("ingress", LogConfig(format="json"))
    logger.info("request ended request_id=%s reason=%s", 'x reason=stop level=error\n{"level": "error"}', "abort")
    (line,) = capfd.readouterr().err.splitlines()
    assert (json.loads(line)["reason"], json.loads(line)["level"]) == ("abort", "info")


def test_a_value_named_as_a_field_of_every_line_does_not_replace_it(capfd):
    log_to_console("ingress", LogConfig(format="json"))
    logger.info("level=%d", 3)
    assert json.loads(capfd.readouterr().err)["level"] == "info"


@pytest.mark.parametrize(("message", "args"), [("100 %", ()), ("%(a)s", ({"a": 1},)), (ValueError("x"), ())])
def test_odd_messages_are_written_all_the_same(capfd, message, args):
    log_to_console("ingress", LogConfig(format="json"))
    logger.warning(message, *args)
    assert json.loads(capfd.readouterr().err)["level"] == "warning"


def test_an_exception_stays_in_its_line(capfd):
    log_to_console("ingress", LogConfig(format="json"))
    try:
        raise ValueError("bad")
    except ValueError:
        logger.error("unexpected error", exc_info=sys.exc_info())
    line = json.loads(capfd.readouterr().err)
    assert line["exception"].endswith("ValueError: bad")


@pytest.mark.parametrize(("level", "shown"), [("debug", 3), ("info", 2), ("error", 1)])
def test_level_says_what_is_shown(capfd, level, shown):
    log_to_console("ingress", LogConfig(level=level))
    for write in (logger.debug, logger.info, logger.error):
        write("a line")
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == shown
    assert all(line.endswith("ingress engine.test a line") for line in lines)
