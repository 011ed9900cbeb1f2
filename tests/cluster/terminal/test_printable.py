"""Nothing that others have written moves a terminal's cursor."""

from __future__ import annotations

import io

import pytest
from rich.table import Table

from cluster.terminal.printable import PrintableConsole, printable

EVIL = "a\x1b[2J\x1b]52;c;ZXZpbA==\x07\x9b31mb\r\x08c"
SHOWN = "a[2J]52;c;ZXZpbA==31mbc"


def test_a_text_keeps_lines_and_tabs_and_nothing_else_that_is_not_shown():
    assert printable(f"{EVIL}\n\td é 字") == f"{SHOWN}\n\td é 字"


@pytest.mark.parametrize("in_table", [False, True])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_console_shows_no_control_characters_but_its_own(in_table, is_terminal):
    console = PrintableConsole(file=io.StringIO(), force_terminal=is_terminal, highlight=False, markup=False, width=80)
    part = EVIL
    if in_table:
        part = Table(title=EVIL)
        part.add_column(EVIL)
        part.add_row(EVIL)
    console.print(part, style="bold")
    shown = console.file.getvalue()
    assert SHOWN in shown and "\x1b[2J" not in shown and "\x07" not in shown and "\x9b" not in shown
    assert ("\x1b[1m" in shown) == is_terminal
