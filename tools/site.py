"""`python tools/site.py FOLDER` collects the pages for mkdocs (tools/mkdocs.yml) and for programs.

They are those that README.md leads to, link by link, at their paths in the repository, with the files that they name.
For programs there are `llms.txt` (llmstxt.org), which lists the pages by task, and `llms-full.txt`, which has them all.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<!\\)\]\(([^()\s]+)\)")
FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)


def links(page: Path) -> Iterator[tuple[str, Path | None, str]]:
    """Yield each link of a page, the file that it names (None for an address of the Internet), and the anchor."""
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = target.partition("#")
        yield target, None if ":" in target else (page.parent / path).resolve() if path else page, anchor


def pages(first: Path = ROOT / "README.md") -> dict[Path, None]:
    """Return README.md and all pages that it leads to, in order."""
    found, waiting = dict[Path, None](), [first]
    while waiting:
        page = waiting.pop(0)
        if page in found or not page.is_file():
            continue
        found[page] = None
        waiting += [file for _, file, _ in links(page) if file is not None and file.suffix == ".md"]
    return found


def collect(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    wanted = {file for page in pages() for _, file, _ in links(page) if file is not None and file.is_file()}
    for file in wanted | set(pages()):
        target = folder / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    (folder / "llms.txt").write_text(llms_txt(), encoding="utf-8")
    (folder / "llms-full.txt").write_text(llms_full(), encoding="utf-8")


def llms_txt() -> str:
    """Return the list of the pages as llmstxt.org has it: those of docs/index.md in its sections, then the others."""
    readme, index = ROOT / "README.md", ROOT / "docs" / "index.md"
    summary = readme.read_text(encoding="utf-8").split("\n\n")[1]
    sections, tasks = {readme: "Overview", index: "Overview"}, dict[Path, list[str]]()
    for task, cell in re.findall(r"^\| (.*?) \| (.*)\|$", index.read_text(encoding="utf-8"), re.MULTILINE):
        if not cell:
            section = task.capitalize()
        for target in LINK.findall(cell):
            page = (index.parent / target.partition("#")[0]).resolve()
            sections.setdefault(page, section)
            tasks.setdefault(page, []).append(task)
    sections |= {page: "Optional" for page in pages() if page not in sections}
    text = " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", summary).split())
    lines = ["# Manta", "", f"> {text}", "", "`llms-full.txt` has the text of all these pages."]
    for name in dict.fromkeys(sections.values()):
        lines += ["", f"## {name}", ""]
        for page in (page for page, section in sections.items() if section == name):
            notes = f": {'; '.join(tasks[page])}" if page in tasks else ""
            lines.append(f"- [{title(page)}]({page.relative_to(ROOT)}){notes}")
    return "\n".join([*lines, ""])


def title(page: Path) -> str:
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ").replace("`", "")


def llms_full() -> str:
    """Return the text of all pages, each below its path, which its links are relative to."""
    return "\n\n".join(f"Source: {page.relative_to(ROOT)}\n\n{page.read_text(encoding='utf-8')}" for page in pages())


if __name__ == "__main__":
    collect(Path(sys.argv[1]))
