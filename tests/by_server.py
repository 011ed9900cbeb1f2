"""How `pytest -n` deals tests out: by file, but files that share a server stay together."""

from __future__ import annotations

from pathlib import PurePosixPath

from xdist.scheduler import LoadFileScheduling


class ByServer(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        """A folder below tests/serve is what one server has to answer."""
        file = PurePosixPath(super()._split_scope(nodeid))
        return str(file.parent if file.parts[:2] == ("tests", "serve") and len(file.parts) > 3 else file)
