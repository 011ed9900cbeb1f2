"""docs/offline.md has the format of `manta generate` as it is."""

from __future__ import annotations

import re

import msgspec
import pytest

from cluster.cli.generate import LINE_FIELDS, SAMPLING_FIELDS, Choice, OutputLine
from tests.docs.pages import block, page, run
from tools.site import ROOT

PAGE = "docs/offline.md"
UNTOLD = {"bad_words_token_ids", "extra_args"}  # what the HTTP API makes of other fields


def first_cells(header: str) -> str:
    """The first column of the table of the page that begins like this."""
    table = page(PAGE).read_text().partition(f"| {header} | |\n| --- | --- |\n")[2].partition("\n\n")[0]
    return " ".join(line.split(" | ")[0] for line in table.splitlines())


def names(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def fields(kind: type[msgspec.Struct]) -> set[str]:
    return {field.name for field in msgspec.structs.fields(kind)}


def test_the_page_names_every_field_of_an_input_line():
    assert names(first_cells("field of an input line")) == (LINE_FIELDS | SAMPLING_FIELDS) - UNTOLD


def test_the_page_names_every_field_of_an_output_line_and_of_its_choices():
    assert names(first_cells("field of an output line")) == fields(OutputLine)
    (choices,) = re.findall(r"^\| `choices` \| (.*) \|$", page(PAGE).read_text(), re.MULTILINE)
    assert fields(Choice) <= names(choices)


@pytest.mark.slow
def test_the_commands_of_the_page_write_the_output_that_it_shows_and_a_second_run_keeps_it(tmp_path):
    script = block(PAGE, "bash", with_="manta generate").rstrip() + " || test $? = 1"  # one line has an error
    for _ in range(2):
        run(script, tmp_path, PYTHONPATH=str(ROOT))
        assert (tmp_path / "out.jsonl").read_text() == block(PAGE, "json", with_='"index"')
