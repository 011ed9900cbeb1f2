"""docs/vllm.md: the flags that everybody has come first, and what the page says of them is so."""

from __future__ import annotations

import re

import typer
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.entry_point import HOST, PORT
from engine.config import EngineConfig
from engine.engine_options import GPU_DEFAULTS
from engine.offline.vllm_flags import NAMES
from tests.docs.pages import block, commands, page
from tools.site import ROOT

PAGE = "docs/vllm.md"
SERVE = typer.main.get_command(app).commands["serve"]


def rows() -> dict[str, str]:
    """The second cell of each row of the first table, by the flags of the first cell."""
    table = page(PAGE).read_text().partition("| flag | here |\n| --- | --- |\n")[2].partition("\n\n")[0]
    return dict(line.strip("| ").split(" | ", 1) for line in table.splitlines())


def test_the_ten_rows_before_the_long_table_have_flags_that_manta_serve_takes():
    text = page(PAGE).read_text()
    assert len(rows()) == 10 and text.index("| flag | here |") < text.index("| flags of `vllm serve` | here |")
    ours = {name for parameter in SERVE.params for name in (*parameter.opts, *parameter.secondary_opts)}
    named = set(re.findall(r"`(--[a-z-]+)", " ".join(map(" ".join, rows().items()))))
    assert named <= ours | NAMES, named - ours - NAMES


def test_defaults_in_these_rows_are_those_of_the_code():
    found, default = rows(), EngineConfig()
    assert found["`--host`, `--port`"] == f"{HOST} and {PORT}"
    assert f"{default.gpu_memory_utilization} instead" in found["`--gpu-memory-utilization F`"]
    batch = found["`--max-num-seqs N`"]
    assert batch.startswith(f"{GPU_DEFAULTS['max_num_seqs']}, and {default.max_num_seqs} on CPUs")
    assert f"{GPU_DEFAULTS['max_num_batched_tokens']:,}, and {default.max_num_batched_tokens:,} on CPUs" in batch


def test_a_command_of_vllm_prints_the_line_that_the_page_shows():
    (command,) = [words for words in commands(ROOT / PAGE) if "--enable-auto-tool-choice" in words]
    result = CliRunner().invoke(app, [*command[1:], "--print-config"])
    assert block(PAGE, "", with_="manta: ignored").strip() in result.output
    assert "name: Qwen3-8B" in result.stdout, "without --served-model-name"
