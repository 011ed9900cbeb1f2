"""The table of vLLM's flags."""

from __future__ import annotations

from pathlib import Path

from typer.main import get_command

from cluster.cli.main import app
from cluster.vllm.command import OBJECTS
from engine.offline.vllm_flags import NAMES, SPECIAL, TABLE, VALUES, find, markdown

SERVE = get_command(app).commands["serve"]  # type: ignore[attr-defined]
OURS = {name for parameter in SERVE.params for name in (*parameter.opts, *parameter.secondary_opts)}
VLLM = {
    flag
    for line in (Path(__file__).parent / "vllm_serve_flags.txt").read_text().splitlines()
    if not line.startswith("#")
    for flag in line.split()
}
SPECIALS = {flag.rstrip("=") for flag in SPECIAL}
DOCS = Path(__file__).parents[3] / "docs"


def test_every_flag_of_vllm_serve_is_ours_too_or_in_the_table():
    assert VLLM <= OURS | NAMES | SPECIALS, VLLM - OURS - NAMES - SPECIALS
    assert NAMES <= VLLM, "a row of a flag that nobody has"
    assert {"--data-parallel-size"} == OURS & (NAMES | SPECIALS), "ours needs no row, but this one may mean replicas"


def test_no_flag_has_two_rows_for_one_value():
    seen = [(name, value) for row in TABLE for name, values in row.named() for value in (values or "").split("|")]
    assert len(seen) == len(set(seen)), [flag for flag in seen if seen.count(flag) > 1]


def test_every_flag_has_a_row_whatever_its_value_is():
    assert all(find(name, "no such value") is not None for name in NAMES), "values without a rest"


def test_flags_that_the_table_names_are_ours():
    words = {word.strip(":;,.'()`") for row in TABLE for word in row.note.split() if word.startswith("--")}
    named = {word.partition(".")[0] for word in words}
    assert named <= OURS, named - OURS
    assert set(VALUES) | set(OBJECTS) - NAMES <= OURS


def test_the_documentation_has_the_table():
    assert markdown() in (DOCS / "vllm.md").read_text()
