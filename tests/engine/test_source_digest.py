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


SOURCE = """
class Rope:
    base: float = 1e4

    def scale(self, x):
        y = x * 2
        return y, "radians"
"""


def digest(engine: Path, source: str) -> str:
    numerics_digest.cache_clear()
    (engine / "model/ops/cpu/attention.py").write_text(source)
    return numerics_digest(engine)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("class Rope:", "# of positions\nclass Rope:  # as in Llama"),
        ("class Rope:", '"""Positions."""\nclass Rope:\n    """Positions."""'),
        ("= 1e4", '= 1e4\n    """Of angles."""'),
        ("x):", "x):\n        '''Return the angle.'''"),
        ("(self, x)", "(\n        self,\n        x,\n    )"),
        ('"radians"', "'radians'"),
    ],
    ids=["comments", "docstrings", "docstring of a field", "docstring of a method", "layout", "quotes"],
)
def test_what_computes_nothing_is_not_among_the_numerics(engine, was, now):
    assert was in SOURCE
    assert digest(engine, SOURCE.replace(was, now)) == digest(engine, SOURCE)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("* 2", "* 3"),
        ("* 2", "+ 2"),
        ("1e4", "1e5"),
        ("1e4", "None"),
        (" = 1e4", ""),
        ("y, ", "x, "),
        ("y, ", "[y], "),
        ('"radians"', '"# radians"'),
        ("    def", "def"),
        ("* 2", "* 2; x = y"),
    ],
)
def test_every_change_of_a_computation_is_among_the_numerics(engine, was, now):
    assert was in SOURCE
    assert digest(engine, SOURCE.replace(was, now)) != digest(engine, SOURCE)


def test_a_wheel_has_the_digest_of_its_checkout(engine):
    before = numerics_digest(engine)
    numerics_digest.cache_clear()
    for file in engine.rglob("*.py"):
        file.write_text("from manta.engine.model import config\n")
    assert numerics_digest(engine) == before


@pytest.mark.parametrize("pattern", NUMERICS)
def test_the_sources_that_compute_are_where_the_digest_looks_for_them(pattern):
    assert list(ENGINE.glob(pattern)), "a folder was moved"
