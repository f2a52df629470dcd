"""A clock that all processes of one daemon share, and that runs faster than the machine's."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

LIBRARY = next(Path("/usr/lib").rglob("libfaketimeMT.so.1"), None)


class FastClock:
    """libfaketime's clock: it begins with the machine's, and every process counts from that same instant."""

    def __init__(self, directory: Path, speed: int) -> None:
        self._file = directory / "clock"
        self._speed = speed
        self._offset_s = 0
        self._write()
        # It holds the shared instant, for daemons that are killed and started again.
        self._holder = subprocess.Popen(
            ["faketime", "-f", f"+0 x{speed}", "sh", "-c", "echo $$ $FAKETIME_SHARED; exec sleep infinity"],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        sleeper, shared = self._holder.stdout.readline().strip().split(" ", 1)
        self._sleeper = int(sleeper)
        self.environment = {
            "LD_PRELOAD": str(LIBRARY),
            "FAKETIME_SHARED": shared,
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            # Of this clock: a look each three minutes, a tenth of a second in ours, costs nothing.
            "FAKETIME_CACHE_DURATION": "1",
        }

    def now(self) -> float:
        """Return the daemon's time (epoch seconds)."""
        environment = {**os.environ, **self.environment}
        shown = subprocess.run(
            ["date", "+%s.%N"], env=environment, capture_output=True, text=True, check=True
        )
        return float(shown.stdout)

    def set_forward(self, seconds: int) -> None:
        """Set the clock, as a person or NTP does; the monotonic one jumps too, as after a suspension."""
        self._offset_s += seconds
        self._write()

    def stop(self) -> None:
        os.kill(self._sleeper, signal.SIGKILL)
        self._holder.wait()  # it removes what its processes shared
        assert self._holder.stdout is not None
        self._holder.stdout.close()

    def _write(self) -> None:
        self._file.write_text(f"{self._offset_s:+d} x{self._speed}\n")
