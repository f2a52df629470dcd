"""How log lines leave the process: as fields of the journal, as JSON lines, or as text.

Whoever logs says what happened in the message and puts what can be searched for
into `extra`; each form carries both.  Under systemd the journal's own protocol is
spoken (https://systemd.io/JOURNAL_NATIVE_PROTOCOL), so that `journalctl
ROLLOUTD_NODE=n3` finds a node's lines.  A line that cannot be delivered is
dropped: a daemon never stands still for its log.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

Form = Literal["auto", "journal", "json", "text"]
"""`auto` is the journal where our stderr is connected to it, else text."""

FORMS: tuple[Form, ...] = ("auto", "journal", "json", "text")

JOURNAL = Path("/run/systemd/journal/socket")

IDENTIFIER = "rolloutd"

MAX_MESSAGE = 8_000
"""Characters of one message: tracebacks fit, evidence of a step does not belong here."""

SEND_BUFFER_BYTES = 1024 * 1024
"""What the kernel keeps for us while the journal is busy."""

_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
"""syslog's numbers; below INFO it is 7."""

_OWN = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}
"""What every record carries; all else came with `extra`."""

_QUIET = ("apscheduler", "asyncssh", "aiosqlite", "asyncio")
"""Libraries that tell of every alarm and connection; their warnings are enough."""


def set_up(form: Form, environ: Mapping[str, str] = os.environ) -> None:
    """Send all log lines of this process out in one form."""
    logging.basicConfig(level=logging.INFO, handlers=[handler(form, environ)], force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def handler(form: Form, environ: Mapping[str, str] = os.environ) -> logging.Handler:
    """Return the handler of a form; where the journal is not there, stderr takes its place."""
    if form == "auto":
        form = "journal" if is_journal(environ) else "text"
    if form == "journal" and JOURNAL.exists():
        return JournalHandler(JOURNAL)
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(JsonLines() if form == "json" else Text())
    return stream


def is_journal(environ: Mapping[str, str], descriptor: int = 2) -> bool:
    """Say whether stderr is the stream that systemd connected to the journal (systemd.exec(5))."""
    device, _, inode = environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        stream = os.fstat(descriptor)
    except OSError:
        return False
    return (device, inode) == (str(stream.st_dev), str(stream.st_ino))


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return what was given with `extra`."""
    return {key: value for key, value in vars(record).items() if key not in _OWN}


class Text(logging.Formatter):
    """One line for people; the fields are in the message already, where they matter."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; a traceback follows on lines of its own."""
        return f"{record.levelname} {record.name}: {_message(record)}"


class JsonLines(logging.Formatter):
    """One JSON object per line: at, level, logger, message and the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        body = {
            **fields_of(record),
            "at": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
        }
        return json.dumps(body, default=str, ensure_ascii=True)


class JournalHandler(logging.Handler):
    """Speaks the journal's native protocol over its socket."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = str(path)
        self._socket: socket.socket | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Send one entry; the next one tries again when this one is lost."""
        try:
            entry = b"".join(_encoded(name, value) for name, value in _entry(record))
            self._connected().send(entry)
        except OSError:
            self.close_socket()
        except (TypeError, ValueError):
            self.handleError(record)

    def close(self) -> None:
        """Close the socket as well."""
        self.close_socket()
        super().close()

    def close_socket(self) -> None:
        """Forget the connection; journald may have been restarted."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connected(self) -> socket.socket:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            self._socket.setblocking(False)
            self._socket.connect(self._path)
        return self._socket


def _message(record: logging.LogRecord) -> str:
    text = record.getMessage()
    if record.exc_info:
        text = f"{text}\n{logging.Formatter().formatException(record.exc_info)}"
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."


def _entry(record: logging.LogRecord) -> Iterator[tuple[str, str]]:
    yield "MESSAGE", _message(record)
    yield "PRIORITY", str(next((number for level, number in _PRIORITIES if record.levelno >= level), 7))
    yield "SYSLOG_IDENTIFIER", IDENTIFIER
    yield "LOGGER", record.name
    yield "CODE_FILE", record.pathname
    yield "CODE_LINE", str(record.lineno)
    yield "CODE_FUNC", record.funcName or ""
    for name, value in fields_of(record).items():
        known = "".join(c if c.isalnum() and c.isascii() else "_" for c in name)
        yield f"ROLLOUTD_{known.upper()}", str(value)


def _encoded(name: str, value: str) -> bytes:
    """Return one field; a value with line breaks carries its length."""
    raw = value.encode("utf-8", "replace")
    if b"\n" not in raw:
        return b"%s=%s\n" % (name.encode(), raw)
    return b"%s\n%s%s\n" % (name.encode(), struct.pack("<Q", len(raw)), raw)
