"""Processes of a run on this machine, found by ROLLOUTD_RUN in their environment.

Neither parent nor process group identifies them: Ansible's workers have their own sessions, and ssh masters
stay.
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
from rolloutd.concurrency import threads

RUN_ID_ENV, RUN_DIR_ENV = "ROLLOUTD_RUN", "ROLLOUTD_RUN_DIR"


@dataclass(frozen=True, slots=True)
class Claim:
    """The holder of a run: `run` (its wrapper) or `daemon` (so that no wrapper ever begins)."""

    holder: str
    pid: int
    start_time: str
    boot_id: str

    @classmethod
    def parse(cls, text: str) -> Claim:
        """Read a claim file; raises ValueError for anything else."""
        by, pid, start_time, boot_id = text.split(" ")
        return cls(by, int(pid), start_time, boot_id.strip())

    def is_alive(self) -> bool:
        """Return whether the process that made the claim still runs."""
        # The kernel reuses pids, so the start time and the boot must match too.
        return (
            self.boot_id == wrapper.boot_id()
            and wrapper.start_time(self.pid) == self.start_time
            and wrapper.is_alive(self.pid)
        )


class ProcessExit:
    """Notification of a process' end, whether or not it is our child."""

    def __init__(self, pid: int, on_exit: Callable[[], None]) -> None:
        """Call `on_exit` at the process' end; raises ProcessLookupError if there is no such process."""
        self._exited = asyncio.Event()
        self._on_exit = on_exit
        self._pid = pid
        self._fd = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._handle_exit)

    def _handle_exit(self) -> None:
        self.close()
        with contextlib.suppress(ChildProcessError):  # after a restart of the daemon a run is not our child
            os.waitpid(self._pid, os.WNOHANG)
        self._exited.set()
        self._on_exit()

    def close(self) -> None:
        """Stop following; safe to repeat."""
        if self._fd >= 0 and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def has_exited(self) -> bool:
        return self._exited.is_set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the end and return whether the process has ended."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._exited.wait()
        except TimeoutError:
            return False
        return True


async def kill_run_processes(run_id: str, directory: Path, sockets: str) -> int:
    """End every process of the run on this machine; return how many are left."""
    return await threads.PROCESSES.run(
        wrapper.kill_processes, run_id.encode(), os.fsencode(directory), sockets.encode()
    )


def request_stop(claim: Claim) -> bool:
    """Ask the wrapper to end its run; return whether the wrapper was alive."""
    if claim.holder != "run" or not claim.is_alive():
        return False
    try:
        os.kill(claim.pid, signal.SIGTERM)
    except ProcessLookupError:
        return False
    return True
