"""Leadership by a lock on the state directory.

The lock is the kernel's (flock), so it ends with its process; the file's content is only for people.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from machines.model.timefmt import format_rfc3339
from rolloutd.errors import AlreadyRunning, LeadershipLost, StoreFailed
from rolloutd.ports import Peers

FILE_NAME = "lock"

POLL_S = 1.0
"""Interval in which a standby tries to take the lock."""

RENEWAL_S = 5.0
"""Interval of looking whether a user has removed the lock's file."""

_STOPPED = frozenset("Tt")
"""Process states of SIGSTOP and of a debugger."""

# Close-on-exec: a run that outlives the daemon would keep the lock.
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class StateLock:
    """The lock on a state directory (ports.Leadership); with `wait`, acquire() waits for its holder's end."""

    def __init__(self, state_dir: Path, *, now: Callable[[], float] = time.time, wait: bool = False) -> None:
        self.lost = asyncio.Event()
        self.peers: Peers | None = None
        self.renewal_s = RENEWAL_S
        self._path = state_dir / FILE_NAME
        self._now = now
        self._wait = wait
        self._file: TextIO | None = None

    def take(self) -> None:
        """Take the lock; raises AlreadyRunning, or StoreFailed when the file cannot be opened."""
        try:
            # A file object: garbage collection releases a forgotten lock.
            file = os.fdopen(os.open(self._path, _FLAGS, 0o600), "a+", encoding="utf-8")
        except OSError as error:
            raise StoreFailed(
                f"{self._path}: cannot be opened ({error}); check owner and mode of its directory"
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _describe_holder(file.fileno())
            file.close()
            raise AlreadyRunning(f"{self._path.parent}: {holder}") from None
        self._file = file
        _write_holder(file, self._now())

    async def acquire(self) -> None:
        prepare_directory(self._path.parent)
        while True:
            try:
                return self.take()
            except AlreadyRunning:
                if not self._wait:
                    raise
            await asyncio.sleep(POLL_S)

    def require(self) -> None:
        if self.lost.is_set():
            raise LeadershipLost(f"{self._path.parent}: another daemon has taken over; this one ends")

    def record_followed(self, seq: int) -> None:
        """Do nothing: a standby of a file follows nothing."""

    async def hand_over(self) -> None:
        await self.release()

    async def renew(self) -> None:
        """Notice that another daemon locked a new file, because a user removed the one of this daemon."""
        if self._file is None or self._is_replaced(self._file.fileno()):
            self.lost.set()

    def _is_replaced(self, descriptor: int) -> bool:
        try:
            return not os.path.samestat(self._path.stat(), os.fstat(descriptor))
        except OSError:
            return False  # no other daemon has locked it; a commit detects one

    async def release(self) -> None:
        self.close()

    def close(self) -> None:
        """Unlock the directory; the file stays: after an unlink, two daemons could each lock a file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _write_holder(file: TextIO, since: float) -> None:
    try:
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "since": since}))
        file.flush()
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


def prepare_directory(state_dir: Path) -> None:
    """Create a state directory where there is none; raises StoreFailed for one that others may change."""
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreFailed(
            f"state directory {state_dir}: cannot be created ({error}); name another one"
        ) from error
    status = state_dir.stat()
    if status.st_mode & 0o022:
        mode = f"{status.st_mode & 0o777:o}"
        raise StoreFailed(
            f"state directory {state_dir}: other users may write to it (mode {mode}); chmod 700 {state_dir}"
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise StoreFailed(
            f"state directory {state_dir}: belongs to uid {status.st_uid}, the daemon runs as uid"
            f" {os.geteuid()}; start it as the owner, or name another directory"
        )
