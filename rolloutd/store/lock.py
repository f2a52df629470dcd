"""Lock of the state directory: one daemon at a time.

The lock is the kernel's (flock), so it ends with its process; the file's content is only for people.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from machines.model.timefmt import format_rfc3339
from rolloutd.errors import AlreadyRunning, StoreFailed

FILE_NAME = "lock"

_STOPPED = frozenset("Tt")
"""Process states of SIGSTOP and of a debugger."""

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class StateLock:
    """The lock on a state directory, held until released."""

    def __init__(self, state_dir: Path, since: float) -> None:
        """Take the lock; raises AlreadyRunning, or StoreFailed when the directory cannot be used."""
        path = state_dir / FILE_NAME
        try:
            # A file object: garbage collection releases a forgotten lock.
            self._file = os.fdopen(os.open(path, _FLAGS, 0o600), "a+", encoding="utf-8")
        except OSError as error:
            raise StoreFailed(
                f"{path} cannot be opened: check owner and mode of its directory ({error})"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _describe_holder(self._file.fileno())
            self._file.close()
            raise AlreadyRunning(f"{state_dir}: {holder}") from None
        self._write(since)

    def release(self) -> None:
        """Unlock the directory; the file stays: after an unlink, two daemons could each lock a file."""
        self._file.close()

    def _write(self, since: float) -> None:
        try:
            self._file.truncate(0)
            self._file.write(json.dumps({"pid": os.getpid(), "since": since}))
            self._file.flush()
        except OSError:
            # The kernel holds the lock; on a full disk only the pid in the file is missing.
            return


def _describe_holder(descriptor: int) -> str:
    """Return which daemon holds the lock, its state, and what ends it."""
    try:
        content = json.loads(os.pread(descriptor, 1024, 0))
        pid, since = int(content["pid"]), format_rfc3339(content["since"])
    except (OSError, ValueError, KeyError, TypeError):
        return "another daemon holds it; find it with `fuser` on the lock file and stop it"
    state = process_state(pid)
    if state in _STOPPED:
        return (
            f"daemon pid {pid}, started {since}, holds it and is suspended; resume it with"
            f" kill -CONT {pid} or end it with kill -KILL {pid}"
        )
    if state == "D":
        return f"daemon pid {pid}, started {since}, holds it and waits for a disk; check that disk"
    return f"daemon pid {pid}, started {since}, holds it and runs; stop that daemon first"


def process_state(pid: int) -> str:
    """Return the state letter of a process as in proc(5), the empty string when unknown."""
    try:
        # The name in parentheses may contain anything, also a parenthesis.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
