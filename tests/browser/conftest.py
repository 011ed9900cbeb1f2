from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.staged_cluster import Stage, staged_cluster


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The system's Chromium, or the one that `make test-browser` installs, without a window."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        pytest.skip("playwright is not installed; `make test-browser` installs it")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium is installed; `make test-browser` installs one by npm, or: apt-get install chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    with staged_cluster() as found:
        yield found


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page in a session of its own. Whatever it complains of, or asks of another host, fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 860}, permissions=["clipboard-write"])
    found = context.new_page()
    found.set_default_timeout(30_000)
    problems: list[str] = []
    found.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on("request", lambda request: problems.append(request.url) if "//127.0.0.1:" not in request.url else None)
    yield found
    context.close()
    # Chromium itself reports each answer of 401, which is how the page learns that it needs a key
    assert [problem for problem in problems if "401 (Unauthorized)" not in problem] == []
