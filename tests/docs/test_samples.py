"""Samples of output on the pages are what the code prints, but for figures and ids."""

from __future__ import annotations

import json
import logging
import re

import pytest
from rich.console import Console

from cluster.cli.explain import show
from cluster.config.app_config import AppConfig
from engine.errors import ConfigError
from placement.console_log import JsonFormatter
from tests.deployments.real_api import real_api_with_prefill
from tests.docs.pages import block
from tests.models import make_model


def normal(text: str) -> list[str]:
    """The lines of a text, with `0` for every figure and id, and one blank for several."""
    return [re.sub(r"\b[0-9a-f]{8,}\b|\d+(\.\d+)?", "0", " ".join(line.split())) for line in text.splitlines()]


async def test_explain_and_the_log_show_a_request_as_the_page_does(tmp_path):
    """Of a model with a prefill engine. Lines of one process are in order; the page leaves out the transfer's."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(JsonFormatter("ingress-1").format(record))  # type: ignore[method-assign]
    logger = logging.getLogger("deployments.frontend.sequence_metrics")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        async with real_api_with_prefill(make_model(tmp_path, "llama", tokenizer=True)) as api:
            answer = await api.complete({"X-Request-Id": "a1"}, prompt=list(range(5, 76)), max_tokens=21)
            timeline = await api.client.get(f"/debug/requests/{answer['id']}")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    console = Console(width=120)
    with console.capture() as printed:
        show(timeline.content, console)
    told, sample = normal(printed.get()), normal(block("docs/observability.md", "", with_="the request came"))
    events = sample.index("seconds where what happened") + 1
    assert told[:events] == sample[:events]
    for where in ("ingress-0", "decode-0", "prefill-0"):
        happened, shown_events = ([line for line in text[events:] if f" {where} " in line] for text in (told, sample))
        assert [line for line in happened if line in shown_events] == shown_events != []
    shown = json.loads(block("docs/observability.md", "json", with_="request_id"))
    assert list(json.loads(lines[-1])) == list(shown)


def test_a_configuration_is_refused_in_the_words_of_the_page():
    model = {"name": "m", "model": "pocket", "handoff": {"switch_roles": True}}
    with pytest.raises(ConfigError) as refused:
        AppConfig.parse({"models": [{**model, "prefill": {"engine": {"tensor_parallel_size": 2}}}]})
    assert block("docs/handoff.md", "", with_="switch_roles`, got 2").strip() == str(refused.value)
