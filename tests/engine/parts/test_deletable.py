"""Each part of an engine can be deleted, with those that need it: it answers chats, and steps as before."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.left_out import command

TABLES = ("engine.parts.table",)
"""Modules that may name all parts."""
TESTS = ["tests/engine/core/test_engine.py", "tests/engine/offline/test_llm.py", "-k", "test_engine or chat"]
FOLDER = Path(__file__).parents[3] / "engine" / "parts"
IMPORTS = re.compile(r"^\s*from engine\.parts\.(\w+)", re.MULTILINE)

OTHER_MODULES = {
    "handoffs": ("engine.kv_transfer",),
    "images": ("engine.multimodal",),
    "kv_tiers": ("engine.kv_offload", "engine.costs.tier_usage"),
    "lora": ("engine.lora",),
    "speculation": ("engine.spec_decode",),
}
"""Modules of a part that are not in its folder."""


def parts() -> list[str]:
    return sorted(file.parent.name for file in FOLDER.glob("*/__init__.py"))


def with_those_that_need(part: str) -> set[str]:
    """Return a part, and all parts that import it, also by way of others."""
    imported = {
        name: {other for file in (FOLDER / name).rglob("*.py") for other in IMPORTS.findall(file.read_text())}
        for name in parts()
    }
    found = {part}
    while more := {name for name, needs in imported.items() if needs & found} - found:
        found |= more
    return found


@pytest.mark.slow
@pytest.mark.parametrize("part", parts())
def test_engine_answers_without_a_part(part: str) -> None:
    left_out = sorted(with_those_that_need(part))
    modules = [module for name in left_out for module in (f"engine.parts.{name}", *OTHER_MODULES.get(name, ()))]
    done = subprocess.run(command(TABLES, modules, TESTS), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_part_on_a_list_is_there() -> None:
    assert OTHER_MODULES.keys() <= set(parts())
