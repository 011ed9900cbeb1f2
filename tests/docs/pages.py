"""What pages have for a reader to run: blocks of code, and the commands in them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.site import FENCE, ROOT, pages

PAGES = list(pages())
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
BIN = Path(sys.executable).parent


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for indent, language, text in BLOCK.findall(page.read_text()):
        if language in languages:
            yield re.sub(rf"^{indent}", "", text, flags=re.MULTILINE)


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command in the blocks for a shell; whole lines, joined at a backslash."""
    for block in blocks(page, "bash", "sh"):
        text = re.sub(r"<<'END'\n.*?\nEND$", "", block, flags=re.MULTILINE | re.DOTALL)
        for line in text.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\||;(?= )", re.split(r"(?:^| )#", line)[0]):
                try:
                    words = shlex.split(re.sub(r"\[[^]]*\]|[<>]+", " ", part))
                except ValueError:  # a quote that another line closes
                    continue
                while words and re.match(r"[A-Z_]+=|\$$|export$", words[0]):
                    words.pop(0)
                if words:
                    yield words


def page(name: str) -> Path:
    return ROOT / name


def named_commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command that a page has in a block or within its text."""
    yield from commands(page)
    for span in re.findall(r"`((?:manta|python|pytest|make) (?!→)[^`]+)`", FENCE.sub("", page.read_text())):
        yield shlex.split(re.sub(r"\[[^]]*\]|[<>\n]+", " ", span))


def block(name: str, *languages: str, with_: str) -> str:
    """The block of a page that contains `with_`."""
    (found,) = [text for text in blocks(page(name), *languages) if with_ in text]
    return found


def run(script: str, folder: Path, **variables: str) -> str:
    """Run a script of bash in a folder with `manta` on its path, and return what it prints."""
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **variables}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout
