"""`manta explain --session`: how the turns of a session are told to people."""

from __future__ import annotations

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.cli.explain_session import row_of, show, summary_of
from cluster.cli.main import app
from deployments.parts.sessions.record import SessionTurn, SessionUsage
from deployments.parts.sessions.routes import SessionBody
from engine.errors import RequestError

TURN = SessionTurn(
    id="chatcmpl-1",
    session="sub",
    model="pocket",
    began_at=1012.5,
    prompt_tokens=200,
    cached_tokens=190,
    output_tokens=30,
    compute_seconds=0.25,
    cost=0.0125,
    wait_s=0.004,
    first_token_s=0.05,
    seconds=0.5,
    finish_reason="budget",
    engines=["decode-1", "decode-2"],
)
RUNS = SessionTurn(id="chatcmpl-2", session="top", model="pocket", began_at=1013.0, prompt_tokens=10)
SESSION = SessionBody(
    id="top",
    created_at=1000.0,
    used_at=1013.0,
    expires_at=87413.0,
    parent=None,
    children=["sub"],
    max_tokens=5000,
    max_budget=None,
    remaining_tokens=4760.0,
    remaining_budget=None,
    usage=SessionUsage(3, 410, 190, 30, 0.25, 0.0125),
    own_usage=SessionUsage(1, 10),
    turns=[TURN, RUNS],
)


def test_the_summary_has_sums_budget_and_what_is_not_listed():
    assert summary_of(SESSION) == [
        ("session", "top"),
        ("children", "sub"),
        ("turns", "3, 2 of them in sessions below it"),
        ("prompts", "410 tokens, 46% of them cached"),
        ("output", "30 tokens"),
        ("cost", "0.2500 s of compute; price 0.0125"),
        ("budget", "5000 tokens"),
        ("left", "4760 tokens"),
        ("older turns", "1, not listed"),
    ]


def test_a_turn_tells_its_wait_hit_cost_and_where_it_ran():
    told = ["12.5", "chatcmpl-1", "sub", "0.004", "0.050", "200", "95%", "30", "0.2500", "0.0125"]
    assert row_of(TURN, 1000.0) == [*told, "decode-1, decode-2", "budget"]
    assert row_of(RUNS, 1000.0)[3:] == ["-", "-", "10", "-", "0", "0.0000", "-", "", "runs"]


def test_everything_is_shown_in_the_order_of_the_turns():
    console = Console(width=200, record=True)
    show(msgspec.json.encode(SESSION), console)
    text = console.export_text()
    assert text.index("chatcmpl-1") < text.index("chatcmpl-2") and "first token s" in text


@pytest.mark.parametrize("words", [[], ["cmpl-1", "--session", "s"]])
def test_either_a_request_or_a_session_is_named(words):
    result = CliRunner().invoke(app, ["explain", *words])
    assert isinstance(result.exception, RequestError) and "--session" in str(result.exception)
