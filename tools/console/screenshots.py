"""Screenshots of the console, for the README: python tools/console/screenshots.py http://127.0.0.1:8000 docs/images

Needs `pip install playwright`, Debian's chromium, and a server such as `manta serve serve_config_pd.yaml`.
"""

from __future__ import annotations

import random
import sys
import threading
from pathlib import Path

import httpx
from playwright.sync_api import Page, sync_playwright

WORDS = ["ocean", "lamp", "river", "brave", "tree", "music", "window", "bread"]
LOAD_S = 12  # so that rates and their curve have something to show


def load(url: str, until: threading.Event) -> None:
    """Ask for definitions with long prompts that no cache has, which prefill replicas compute."""
    while not until.is_set():
        word = random.choice(WORDS)
        question = (
            f"{random.random()} " + " ".join(f"What is a {other}?" for other in WORDS * 6) + f" What does {word} mean?"
        )
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 200}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status()


def shoot(page: Page, url: str, out: Path, theme: str) -> None:
    page.emulate_media(color_scheme=theme)
    page.goto(f"{url}/#playground")
    page.get_by_text("Settings").first.click()
    page.get_by_text("Show how probable each token was").first.click()
    page.get_by_text("Settings").first.click()
    page.get_by_role("button", name="What is an ocean?").click()
    page.wait_for_selector(".turn.assistant:not(.streaming) .token", timeout=60_000)
    page.locator(".token").nth(4).hover()
    page.screenshot(path=out / f"playground-{theme}.png")
    ended = threading.Event()
    clients = [threading.Thread(target=load, args=(url, ended), daemon=True) for _ in range(6)]
    for client in clients:
        client.start()
    page.goto(f"{url}/#cluster")
    page.wait_for_timeout(1000 * LOAD_S)
    page.locator(".handoff.active").first.wait_for(state="attached", timeout=60_000)  # a straight line has no height
    page.wait_for_function("/^[1-9]/.test(document.getElementById('pulse').textContent)", timeout=60_000)
    page.screenshot(path=out / f"cluster-{theme}.png")
    ended.set()
    for client in clients:
        client.join()
    page.goto(f"{url}/#requests")
    page.locator(".requests a").first.click()
    page.wait_for_selector(".story")
    page.screenshot(path=out / f"request-{theme}.png")


def main() -> None:
    url, out = sys.argv[1].rstrip("/"), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for theme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 1280, "height": 860})
            shoot(page, url, out, theme)
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
