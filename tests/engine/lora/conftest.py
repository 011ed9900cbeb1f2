from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.engine.lora.adapted_models import AdaptedModel
from tests.one_thread import one_thread

__all__ = ["one_thread"]  # pytest finds it here


@pytest.fixture(scope="package")
def adapted(tmp_path_factory) -> Callable[[str], AdaptedModel]:
    """Gives the model of a family with its adapters, which is made when it is first asked for."""
    return cache(lambda family: AdaptedModel(tmp_path_factory.mktemp(family), family))
