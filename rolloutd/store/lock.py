"""One daemon per state directory.

The lock is the kernel's (flock), so it ends with its process however that ends;
what stands in the file is for people only.
"""

from __future__ import annotations

import fcntl
import json
import os
from datetime import UTC, datetime
from pathlib import Path

from rolloutd.errors import AlreadyRunning, StoreFailed

FILE_NAME = "lock"

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class StateLock:
    """The lock on a state directory, held until released."""

    def __init__(self, state_dir: Path, since: float) -> None:
        """Take the lock; raises AlreadyRunning, or StoreFailed when the directory cannot be used."""
        path = state_dir / FILE_NAME
        try:
            # A file object, so that the lock goes with it should nobody release it.
            self._file = os.fdopen(os.open(path, _FLAGS, 0o600), "a+", encoding="utf-8")
        except OSError as error:
            raise StoreFailed(
                f"{path} cannot be opened: check owner and mode of its directory ({error})"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(self._file.fileno())
            self._file.close()
            raise AlreadyRunning(
                f"{state_dir} is held by another daemon{holder}: end that one first"
            ) from None
        self._write(since)

    def release(self) -> None:
        """Give the directory free; the file stays, for removing it would let two daemons in."""
        self._file.close()

    def _write(self, since: float) -> None:
        try:
            self._file.truncate(0)
            self._file.write(json.dumps({"pid": os.getpid(), "since": since}))
            self._file.flush()
        except OSError:
            # The kernel's lock is what counts; on a full disk only the explanation is missing.
            return


def _holder(descriptor: int) -> str:
    """Say who holds the lock, as far as the file tells."""
    try:
        told = json.loads(os.pread(descriptor, 1024, 0))
        since = datetime.fromtimestamp(told["since"], UTC).isoformat(timespec="seconds")
        return f", pid {int(told['pid'])}, since {since}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
