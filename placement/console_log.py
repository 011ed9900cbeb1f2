"""Writes the log lines of our processes as text or JSON. Ray forwards them to the console of `serve run`."""

from __future__ import annotations

import logging
import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

TEXT = "%(asctime)s {who} %(name)s %(message)s"
BELOW = __name__.removesuffix("placement.console_log")  # `manta.` where a wheel is installed
PACKAGES = tuple(f"{BELOW}{package}" for package in ("engine", "placement", "deployments", "cluster"))
CONVERSION = re.compile(r"(?:(\w+)=)?%[-#0 +]*[\d*]*(?:\.[\d*]+)?[a-zA-Z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    format: LogFormat = "text"
    level: LogLevel = "info"  #: `debug` also shows each step of every request's life


def log_to_console(who: str, config: LogConfig = LogConfig()) -> None:
    """Write our packages' log lines to the console, each with `who`, the name of this process. Other libraries are
    unaffected."""
    handler = console_handler(who, config)
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.setLevel(config.level.upper())
        logger.handlers = [handler]
        logger.propagate = False


def console_handler(who: str, config: LogConfig = LogConfig()) -> logging.Handler:
    """Return a handler that writes lines to the console in our format."""
    handler = logging.StreamHandler(sys.__stderr__)  # Serve may have turned sys.stderr into its log file
    text = logging.Formatter(TEXT.format(who=who), datefmt="%H:%M:%S")
    handler.setFormatter(JsonFormatter(who) if config.format == "json" else text)
    return handler


class JsonFormatter(logging.Formatter):
    """Formats each line as a JSON object. Values that a message names, as in `steps=%d`, are separate keys.

    The values come from the arguments of the logging call, not from the finished text, so a client's request id cannot
    forge a key.
    """

    def __init__(self, who: str):
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._who,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line = {**named_values(record.msg, record.args), **line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def named_values(message: object, args: object) -> dict[str, Any]:
    """Return the `%` arguments that follow a name, as in `steps=%d`, by name."""
    if not isinstance(message, str) or not isinstance(args, tuple):
        return {}
    names = [match[1] for match in CONVERSION.finditer(message.replace("%%", ""))]
    return {name: value for name, value in zip(names, args, strict=False) if name}
