"""Reserve on the disk of the state directory: allocated space that is given up when the disk is full.

While the reserve is not whole, no node starts.  The space that it gives up is for the runs in progress and
for the database.  It knows no settings.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from machines.model.limits import DiskShortage
from rolloutd.engine.state import State
from rolloutd.texts.formats import format_size

log = logging.getLogger(__name__)

FILE_NAME = "reserve"

MAX_RESERVE_BYTES = 64 * 1024 * 1024
"""Enough for the logs of the runs in progress and for the database, until a user has freed space."""

SHARE_OF_DISK = 50
"""A small disk gives a fiftieth of itself."""

CHECK_INTERVAL_S = 1.0
"""Interval of the checks; one is a single system call."""

CONDITION = "disk"


class DiskReserve:
    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE_NAME
        disk = os.statvfs(state_dir)
        self.size = min(MAX_RESERVE_BYTES, disk.f_blocks * disk.f_frsize // SHARE_OF_DISK)

    def update(self) -> int | None:
        """Give up the reserve or take it again; return the free bytes while it is not whole, else None.

        It is given up when half of its size is free, and taken again when twice its size is.
        """
        free = self._free()
        try:
            is_whole = self._path.stat().st_blocks * 512 >= self.size
        except FileNotFoundError:
            is_whole = False
        if is_whole and free < self.size // 2:
            # Truncated, not removed: that frees the space also where the directory cannot be written.
            os.truncate(self._path, 0)
            return self._free()
        if is_whole or (free >= 2 * self.size and self._allocate()):
            return None
        return free

    def _free(self) -> int:
        disk = os.statvfs(self._path.parent)
        return disk.f_bavail * disk.f_frsize

    def _allocate(self) -> bool:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Allocated: a file with holes has no blocks that it could give up.
            os.posix_fallocate(descriptor, 0, self.size)
        except OSError:  # another program was faster
            os.ftruncate(descriptor, 0)
            return False
        finally:
            os.close(descriptor)
        return True


async def keep_reserve(state: State) -> None:
    """Check the disk until cancelled; report a full one, and start no node meanwhile."""
    reserve = DiskReserve(state.settings.state_dir)
    while True:
        try:
            _report(state, reserve.size, reserve.update())
        except OSError as error:
            _report_error(state, error)
        await asyncio.sleep(CHECK_INTERVAL_S)


def _report(state: State, size: int, free: int | None) -> None:
    known = state.index.disk_shortage
    if free is None:
        state.conditions.pop(CONDITION, None)  # also that of an error before
    else:
        state.conditions[CONDITION] = (
            f"{state.settings.state_dir}: {format_size(free)} free, nothing starts;"
            f" free {format_size(2 * size)}"
        )
    if (free is None) == (known is None):
        return
    state.index.record_disk_shortage(None if free is None else DiskShortage(free, 2 * size, state.now()))
    if free is None:
        log.info("disk: there is space again below %s", state.settings.state_dir)
    else:
        log.error("disk: %s", state.conditions[CONDITION])
    state.wake_up()


def _report_error(state: State, error: OSError) -> None:
    text = f"{state.settings.state_dir}: its free space is unknown ({error.strerror}); check the disk"
    if state.conditions.get(CONDITION) != text:
        state.conditions[CONDITION] = text
        log.error("disk: %s", text)
