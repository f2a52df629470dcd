"""Log output: journal fields, JSON lines, or text.

The message says what happened, `extra` holds what can be searched for; each form carries both.  Under systemd
it uses the journal's own protocol (https://systemd.io/JOURNAL_NATIVE_PROTOCOL), so `journalctl
ROLLOUTD_NODE=n3` finds a node's lines.  A line that cannot be delivered is dropped: the daemon never blocks
on its log.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from machines.model.timefmt import format_rfc3339

LogFormat = Literal["auto", "journal", "json", "text"]
"""`auto` is the journal if our stderr is connected to it, else text."""

LOG_FORMATS: tuple[LogFormat, ...] = ("auto", "journal", "json", "text")

JOURNAL_SOCKET = Path("/run/systemd/journal/socket")

IDENTIFIER = "rolloutd"

MAX_MESSAGE = 8_000
"""Characters of one message: enough for a traceback; the output of a step is not logged."""

SEND_BUFFER_BYTES = 1024 * 1024
"""What the kernel buffers while the journal is busy."""

_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
"""syslog's numbers; below INFO it is 7."""

_STANDARD_ATTRIBUTES = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {
    "message",
    "asctime",
    "taskName",
}
"""Attributes of every record; all others came with `extra`."""

_NOISY_LOGGERS = ("apscheduler", "asyncssh", "aiosqlite", "asyncio", "transitions")
"""Libraries that log every timer and connection; only their warnings are written."""

REPEAT_WINDOW_S = 60.0
"""Lines of one place in the code within this time are merged beyond MAX_REPEATS."""

MAX_REPEATS = 20
"""Equal lines that are written in one window; the filter only counts the others."""

MAX_PLACES = 1024
"""Distinct lines that the filter keeps; it drops the one that was logged longest ago first."""


class RepeatFilter(logging.Filter):
    """Merges lines of warnings and errors that repeat, so that no fault can fill the disk with its log.

    Lines are equal when they have the same place in the code and the same format string without digits.
    """

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[tuple[str, str, int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line is written; the first of a new window reports how many were suppressed."""
        if record.levelno < logging.WARNING:
            return True
        # Some libraries (asyncio) format before they log: ignore digits, which are addresses or descriptors.
        words = "".join(each for each in str(record.msg)[:200] if not each.isdigit())
        key = (record.name, record.pathname, record.lineno, words)
        started_at, count = self._windows.pop(key, (record.created, 0))
        suppressed = 0
        if not 0 <= record.created - started_at < REPEAT_WINDOW_S:
            started_at, count, suppressed = record.created, 0, max(0, count - MAX_REPEATS)
        while len(self._windows) >= MAX_PLACES:
            del self._windows[next(iter(self._windows))]
        self._windows[key] = (started_at, count + 1)
        if suppressed:
            record.msg, record.args = f"{record.getMessage()} ({suppressed} more like this before)", ()
        return count < MAX_REPEATS


def configure_logging(log_format: LogFormat) -> None:
    logging.basicConfig(level=logging.INFO, handlers=[make_handler(log_format)], force=True)
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def make_handler(log_format: LogFormat) -> logging.Handler:
    """Return the handler of a form; without a journal it writes to stderr."""
    if log_format == "auto":
        log_format = "journal" if is_connected_to_journal(os.environ) else "text"
    handler: logging.Handler
    if log_format == "journal" and JOURNAL_SOCKET.exists():
        handler = JournalHandler(JOURNAL_SOCKET)
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    handler.addFilter(RepeatFilter())
    return handler


def is_connected_to_journal(environ: Mapping[str, str], descriptor: int = 2) -> bool:
    """Return whether stderr is the stream that systemd connected to the journal (systemd.exec(5))."""
    device, _, inode = environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        stream = os.fstat(descriptor)
    except OSError:
        return False
    return (device, inode) == (str(stream.st_dev), str(stream.st_ino))


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD_ATTRIBUTES}


class TextFormatter(logging.Formatter):
    """Text for people, without the fields: the message names those that matter.

    Further lines are indented, and control characters replaced: a name of an inventory or the output of a
    node must not look like an entry of the log.
    """

    def format(self, record: logging.LogRecord) -> str:
        lines = _format_message(record).split("\n")
        shown = ("".join(c if c.isprintable() else "\ufffd" for c in line) for line in lines)
        at = format_rfc3339(record.created)
        return f"{at} {record.levelname} {record.name}: " + "\n  ".join(shown)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: at, level, logger, message and the fields."""

    def format(self, record: logging.LogRecord) -> str:
        body = {
            **extra_fields(record),
            "at": format_rfc3339(record.created, "milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _format_message(record),
        }
        return json.dumps(body, default=str, ensure_ascii=True)


class JournalHandler(logging.Handler):
    """Sends entries to the journal with its native protocol."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = str(path)
        self._socket: socket.socket | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Send one entry; after an error the entry is lost and the next one reconnects."""
        try:
            entry = b"".join(_encode_field(name, value) for name, value in _journal_fields(record))
            self._connect().send(entry)
        except OSError:
            self.close_socket()
        except (TypeError, ValueError):
            self.handleError(record)

    def close(self) -> None:
        self.close_socket()
        super().close()

    def close_socket(self) -> None:
        """Close the connection; the next entry reconnects, because journald may have been restarted."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self) -> socket.socket:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            self._socket.setblocking(False)
            self._socket.connect(self._path)
        return self._socket


def _format_message(record: logging.LogRecord) -> str:
    text = record.getMessage()
    if record.exc_info:
        text = f"{text}\n{logging.Formatter().formatException(record.exc_info)}"
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."


def _journal_fields(record: logging.LogRecord) -> Iterator[tuple[str, str]]:
    yield "MESSAGE", _format_message(record)
    yield "PRIORITY", str(next((number for level, number in _PRIORITIES if record.levelno >= level), 7))
    yield "SYSLOG_IDENTIFIER", IDENTIFIER
    yield "LOGGER", record.name
    yield "CODE_FILE", record.pathname
    yield "CODE_LINE", str(record.lineno)
    yield "CODE_FUNC", record.funcName or ""
    for name, value in extra_fields(record).items():
        field_name = "".join(c if c.isalnum() and c.isascii() else "_" for c in name)
        yield f"ROLLOUTD_{field_name.upper()}", str(value)


def _encode_field(name: str, value: str) -> bytes:
    """Return one field; a value with line breaks is sent with its length first."""
    raw = value.encode("utf-8", "replace")
    if b"\n" not in raw:
        return b"%s=%s\n" % (name.encode(), raw)
    return b"%s\n%s%s\n" % (name.encode(), struct.pack("<Q", len(raw)), raw)
