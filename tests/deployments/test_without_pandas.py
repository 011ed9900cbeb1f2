from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec

import pytest

from deployments.without_pandas import IMPORTER


@pytest.mark.skipif(find_spec("pandas") is None, reason="pandas is not installed")
def test_serve_does_without_pandas_and_others_find_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "pandas", raising=False)
    spec = find_spec(IMPORTER)
    anew = module_from_spec(spec)
    spec._initializing = True  # as Python's import does
    monkeypatch.setitem(sys.modules, IMPORTER, anew)
    spec.loader.exec_module(anew)
    assert anew.pd is None
    spec._initializing = False
    assert find_spec("pandas") is not None
