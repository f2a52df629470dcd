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
            raise AlreadyRunning(
                f"{state_dir} is held by another daemon{holder}: end that one first"
            ) from None
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
    """Return pid and start of the daemon that holds the lock, or the empty string."""
    try:
        content = json.loads(os.pread(descriptor, 1024, 0))
        since = format_rfc3339(content["since"])
        return f", pid {int(content['pid'])}, since {since}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
