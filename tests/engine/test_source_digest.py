"""Digests of sources tell versions apart that differ in what they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.source_digest import ENGINE, NUMERICS, numerics_digest


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """The folder of an engine with some of its sources."""
    for name in ("model/ops/cpu/attention.py", "parts/holds/holds.py", "parts/lora/rank/adapters.py", "wire/plan.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_text("from engine.model import config\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("model/ops/cpu/attention.py", True),
        ("parts/lora/rank/adapters.py", True),
        ("model/ops/cpu/softmax.py", True),
        ("parts/holds/holds.py", False),
        ("wire/plan.py", False),
    ],
)
def test_numerics_are_the_sources_that_compute_and_no_others(engine, name, counts):
    before = numerics_digest(engine)
    numerics_digest.cache_clear()
    (engine / name).write_text("SCALE = 2\n")
    assert (numerics_digest(engine) != before) == counts


def test_a_wheel_has_the_digest_of_its_checkout(engine):
    before = numerics_digest(engine)
    numerics_digest.cache_clear()
    for file in engine.rglob("*.py"):
        file.write_text("from manta.engine.model import config\n")
    assert numerics_digest(engine) == before


@pytest.mark.parametrize("pattern", NUMERICS)
def test_the_sources_that_compute_are_where_the_digest_looks_for_them(pattern):
    assert list(ENGINE.glob(pattern)), "a folder was moved"
