"""Folder of a server's HAProxy: its configurations, sockets and logs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import cache

PARENT = "/tmp"  # as in Ray, because socket paths must be short
# Ray's variables, and the path below the folder that each names. Ray adds a folder for each node to all of them.
FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "/haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "/admin.sock",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "/metrics.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "/server-state",
}
# A shell that has no parent, because it must outlive a SIGKILL of this process, whose end also ends its `read`. This
# reads from 3, a copy of its standard input, because background commands have none.
REMOVE = """
exec 3<&0
(trap "" INT TERM HUP; read -r _ <&3; until rm -rf -- "$FOLDER"; do sleep 1; done) &
"""


@cache
def server_folder() -> dict[str, str]:
    """Create a folder that only this user can access, and that is removed however this process ends. Returns the
    variables that tell Ray its path.

    Ray's own folder is shared by all clusters and users of a machine, and is left behind.
    """
    if sys.platform != "linux":
        return {}
    folder = tempfile.mkdtemp(prefix="haproxy-", dir=PARENT)
    ends_with_us, _ = os.pipe()  # no other process has the other end, which is open as long as this process lives
    environment, nothing = {"FOLDER": folder, "PATH": os.defpath}, subprocess.DEVNULL
    subprocess.run(
        ["/bin/sh", "-c", REMOVE],
        stdin=ends_with_us,
        stdout=nothing,
        stderr=nothing,
        env=environment,
        start_new_session=True,
        check=True,
    )
    os.close(ends_with_us)
    return {name: folder + file for name, file in FILES.items()}
