"""The processes of a run on this machine: found by its mark, followed by pidfd, ended.

Ansible's workers sit in sessions of their own and ssh masters stay behind, so
neither parent nor group tells what belongs to a run: the environment variable
ROLLOUTD_RUN does.  It knows nothing of nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rolloutd.adapters.ansible import wrapper

MARK, PLACE = "ROLLOUTD_RUN", "ROLLOUTD_RUN_DIR"


@dataclass(frozen=True, slots=True)
class Claim:
    """Who holds a run: `by` is `run` (its wrapper) or `daemon` (so that no wrapper ever will)."""

    by: str
    pid: int
    start_time: str
    boot_id: str

    @classmethod
    def parse(cls, text: str) -> Claim:
        """Read a claim file; raises ValueError for anything else."""
        by, pid, start_time, boot_id = text.split(" ")
        return cls(by, int(pid), start_time, boot_id.strip())

    def lives(self) -> bool:
        """Say whether the very process that made the claim still runs."""
        return (
            self.boot_id == wrapper.boot_id()
            and wrapper.start_time(self.pid) == self.start_time
            and wrapper.alive(self.pid)
        )


class Departure:
    """Becomes set at the moment a process ends, be it a child of ours or not."""

    def __init__(self, pid: int, then: Callable[[], None]) -> None:
        """Follow the process and call `then` at its end; raises ProcessLookupError when there is none."""
        self._gone = asyncio.Event()
        self._then = then
        self._pid = pid
        self._fd = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._note)

    def _note(self) -> None:
        self.close()
        with contextlib.suppress(ChildProcessError):  # a run that was found again is no child of ours
            os.waitpid(self._pid, os.WNOHANG)
        self._gone.set()
        self._then()

    def close(self) -> None:
        """Stop following; safe to repeat."""
        if self._fd >= 0 and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def gone(self) -> bool:
        """Whether the process has ended."""
        return self._gone.is_set()

    async def wait(self, limit_s: float) -> bool:
        """Wait for the end at most so long; say whether it has come."""
        try:
            async with asyncio.timeout(limit_s):
                await self._gone.wait()
        except TimeoutError:
            return False
        return True


async def end_all(run: str, directory: Path, sockets: str) -> int:
    """End every process of the run on this machine; return how many would not go."""
    return await asyncio.to_thread(wrapper.sweep, run.encode(), os.fsencode(directory), sockets.encode())


def ask_to_end(claim: Claim) -> bool:
    """Ask the wrapper to end its run; false when it is not there any more."""
    if claim.by != "run" or not claim.lives():
        return False
    try:
        os.kill(claim.pid, signal.SIGTERM)
    except ProcessLookupError:
        return False
    return True
