"""Adapters in the console: the pocket model and its pirate, on a real engine."""

from __future__ import annotations

import shutil

import pytest

from cluster.config.ingress_section import IngressSection
from cluster.config.model_section import ModelSection
from cluster.model_info import model_info
from engine.lora.adapter_files import PIRATE
from engine.pocket import PATH
from tests.browser.real_server import real_server
from tests.browser.test_console import SLOW_MS, ask

expect = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed; `make test-browser` installs it"
).expect


def test_an_adapter_is_listed_and_chosen_and_answers_beside_the_model_it_adapts(page, tmp_path):
    section = ModelSection(
        name="pocket", model="pocket", lora_modules={"pirate": "pocket-pirate"}, lora={"dynamic_folder": str(tmp_path)}
    )
    with real_server(PATH, model_info(section, IngressSection())) as url:
        page.goto(url)
        page.get_by_role("button", name="Side by side").click()
        left, right = page.locator(".pane").all()
        options = left.get_by_label("Model").locator("option")
        expect(options).to_have_text(["pocket", "pirate"], timeout=SLOW_MS)
        right.get_by_label("Model").select_option("pirate")
        for pane in (left, right):
            pane.get_by_text("Settings").click()
            pane.get_by_label("temperature").fill("0")
        ask(page, "Hi")
        answers = page.locator(".turn.assistant:not(.streaming) .text")
        expect(answers).to_have_count(2, timeout=SLOW_MS)
        plain, adapted = answers.all_inner_texts()
        assert "Arr" in adapted and "matey" in adapted and "Arr" not in plain, (plain, adapted)
        right.get_by_role("button", name="Code").click()
        expect(page.get_by_role("dialog", name="The same request as code")).to_contain_text('"model": "pirate"')
        page.keyboard.press("Escape")

        page.get_by_role("link", name="Requests").click()
        rows = page.locator(".requests tbody tr")
        expect(rows).to_have_count(2, timeout=SLOW_MS)
        assert {row.locator("td").nth(1).inner_text() for row in rows.all()} == {"pocket", "pirate"}
        rows.filter(has_text="pirate").get_by_role("link").click()
        expect(page.locator("dl.pairs")).to_contain_text("adapterpirate")

        page.get_by_role("link", name="Models").click()
        expect(page.locator("dl.pairs")).to_contain_text("adapterspirate")
        later = "<img src=x onerror=document.title='owned'>"
        shutil.copytree(PIRATE, tmp_path / later)  # an adapter that comes while the page is open
        page.get_by_role("link", name="Playground").click()
        expect(options).to_have_text(["pocket", "pirate", later], timeout=SLOW_MS)
        expect(right.get_by_label("Model")).to_have_value("pirate")

        right.get_by_label("Model").select_option(later)
        ask(page, "Hi")
        expect(answers).to_have_count(4, timeout=SLOW_MS)
        for view, place in (("Requests", ".requests td"), ("Models", "dl.pairs")):
            page.get_by_role("link", name=view).click()
            expect(page.locator(place, has_text="onerror").first).to_be_visible(timeout=SLOW_MS)
        assert page.locator("main img, main script").count() == 0
        assert page.title() == "Manta · models"
        page.close()
