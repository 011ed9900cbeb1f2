"""`python tools/site.py FOLDER` collects the pages for mkdocs (tools/mkdocs.yml).

They are those that README.md leads to, link by link, at their paths in the repository, with the files that they name.
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


if __name__ == "__main__":
    collect(Path(sys.argv[1]))
