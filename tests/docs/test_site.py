"""The site has a list of the pages for programs, in the form of llmstxt.org, and one file with all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES
from tools.site import ROOT, collect


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    collect(folder)
    return folder


def test_the_list_has_a_title_a_summary_and_sections_of_links_and_nothing_else(site):
    head, *sections = re.split(r"^## ", (site / "llms.txt").read_text(), flags=re.MULTILINE)
    title, summary, note = head.strip().split("\n\n")
    assert title == "# Manta"
    assert summary.startswith("> Manta serves large language models") and "\n" not in summary and "](" not in summary
    assert (site / re.findall(r"`(.*?)`", note)[0]).is_file()
    for section in sections:
        name, _, entries = section.strip().partition("\n\n")
        assert re.fullmatch(r"[A-Z][a-z ]+", name)
        for entry in entries.splitlines():
            assert re.fullmatch(r"- \[[^]]+\]\([^)]+\.md\)(: .+)?", entry), entry


def test_the_list_has_each_page_once_by_a_link_to_its_file(site):
    listed = re.findall(r"^- \[.*?\]\((.*?)\)", (site / "llms.txt").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT)) for page in PAGES)
    assert all((site / file).is_file() for file in listed)


def test_pages_stand_in_the_sections_of_the_index_with_their_tasks(site):
    text = (site / "llms.txt").read_text()
    operate = text[text.index("## Operate") : text.index("## Debug")]
    assert "- [Limits of API keys](docs/quotas.md): limits of API keys: requests, tokens, budgets" in operate
    assert text.rindex("## Optional") == text.rindex("\n## ") + 1, "what may be left out comes last"


def test_one_file_has_the_whole_text_of_each_page_below_its_path(site):
    full = (site / "llms-full.txt").read_text()
    for page in PAGES:
        assert f"Source: {page.relative_to(ROOT)}\n\n{page.read_text()}" in full
