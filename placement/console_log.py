"""Log lines of our actors; Ray carries them to the console of `serve run`."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s {who} %(name)s %(message)s"
PACKAGES = ("engine", "placement", "deployments", "cluster")


def log_to_console(who: str) -> None:
    """Show this process' own log lines from INFO on, each with `who` wrote it. Other libraries keep their settings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT.format(who=who), datefmt="%H:%M:%S"))
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.setLevel(logging.INFO)
        logger.handlers = [handler]
        logger.propagate = False
