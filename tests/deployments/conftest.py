from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import pytest

from tests.deployments.fake_api import FakeApi, fake_api


@pytest.fixture
def api() -> AbstractAsyncContextManager[FakeApi]:
    """The HTTP API over a fake engine, for tests that are coroutines: they get what entering it returns."""
    return fake_api()
