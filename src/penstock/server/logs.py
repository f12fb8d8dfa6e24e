"""Lines of the log: for people, or a JSON object each for programs."""

from __future__ import annotations

import datetime
import io
import json
import logging
import sys
import threading
from typing import Literal

LogFormat = Literal["text", "json"]


class TextLines(logging.Formatter):
    """Date, level where it is no plain information, message."""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        return f"{_date(record)} {level}{super().format(record)}"


class JsonLines(logging.Formatter):
    """`time`, `level`, `message`, and of a request what is in its line as `fields` of the record."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _date(record), "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line | getattr(record, "fields", {}))


class LogStream(io.TextIOBase):
    """A stderr whose lines become lines of the log: remarks, warnings, progress of compilation."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        own = self._of_thread
        if not getattr(own, "writing", False):  # what the log says when it cannot write has nowhere to go
            own.writing = True
            try:
                *lines, own.rest = (getattr(own, "rest", "") + text).split("\n")
                for line in filter(None, map(str.strip, lines)):
                    logging.getLogger("penstock.start").info("%s", line)
            finally:
                own.writing = False
        return len(text)


def _date(record: logging.LogRecord) -> str:
    """Of this machine's zone, with its distance from UTC."""
    return datetime.datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


def start_log(level: str, requests: bool, form: LogFormat) -> None:
    """Our lines and uvicorn's errors, on stderr. `penstock.start` has what is said of the start, at any level."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextLines() if form == "text" else JsonLines())
    rank = logging.getLevelNamesMapping().__getitem__
    own = level if requests else max(level, "WARNING", key=rank)
    for name, least in (("penstock.server", own), ("penstock.start", "INFO"), ("uvicorn.error", "ERROR")):
        logger = logging.getLogger(name)
        logger.setLevel(least)
        logger.handlers = [handler]
        logger.propagate = False
