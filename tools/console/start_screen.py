"""The start of `manta serve` as a picture: python tools/console/start_screen.py RECORDING FILE.svg

RECORDING is what a terminal of 80 columns was sent: script -qc 'manta serve pocket' RECORDING
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 80
TAKEN_BACK = re.compile(r"(?:\r?\x1b\[2K(?:\x1b\[1A)?)+")  # how rich clears what it draws again


def screens(recording: str) -> list[str]:
    """Return the start while weights are read, and what stays on the terminal once the server is ready: the box, and a
    request."""
    text = re.sub(r"\x1b\[\?25[lh]", "", recording)
    starting = [frame for frame in TAKEN_BACK.split(text) if "weights" in frame and "is ready" not in frame]
    ready = text[text.index("╭") :].partition("}'")
    return [starting[0].strip("\r\n"), "\n".join(line.rstrip() for line in "".join(ready[:2]).splitlines())]


def main() -> None:
    recording = Path(sys.argv[1]).read_text(encoding="utf-8", errors="replace")
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere)
        console.print(Text("$ manta serve pocket"))
        for screen in screens(recording):
            console.print(Text.from_ansi(screen))
            console.print()
        svg = console.export_svg(title="manta serve")
    Path(sys.argv[2]).write_text(re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
