"""How `pytest -n` deals tests out: by file, but one process has all that start clusters, and waits for them."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

SERVERS = "tests/serve/"


class ByServer(LoadFileScheduling):
    """Files of one folder below tests/serve share a server. Clusters that start at once take longer than one after the
    other, with tests that compute beside them."""

    def _split_scope(self, nodeid: str) -> str:
        return SERVERS if nodeid.startswith(SERVERS) else super()._split_scope(nodeid)
