"""Runs all measurements, one after the other: `make bench`, or `python -m bench NAME ...` for some.

Options go to the one measurement that is named before them: `python -m bench scale --json`.
Each is a program of its own beside this file, so that none warms or burdens the
next.  All of them are run, also after one has failed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

LIMIT_S = 7200.0
"""The longest measurement takes an hour; one that takes longer than this hangs."""

TERMINATION_S = 30.0
"""Time for a measurement to end its processes and remove up to 5 GB of files."""


def main(wanted: list[str]) -> int:
    """Run the measurements and return 0 when all of them could be made and none exceeds its limits."""
    known = {path.stem: path for path in sorted(HERE.glob("*.py")) if not path.stem.startswith("_")}
    if len(wanted) > 1 and wanted[1].startswith("-"):
        wanted, options = wanted[:1], wanted[1:]
    else:
        options = []
    unknown = set(wanted) - known.keys()
    if unknown:
        print(f"no measurement {', '.join(sorted(unknown))}; there is {', '.join(known)}", file=sys.stderr)
        return 2
    failed: list[str] = []
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for name in wanted or known:
        if not options:  # its output alone, which may be JSON
            print(f"-- {name}", flush=True)
        with subprocess.Popen([sys.executable, "-m", f"bench.{name}", *options], cwd=HERE.parent) as running:
            try:
                failed += [name] * bool(running.wait(LIMIT_S))
            finally:
                running.terminate()  # a measurement removes its files
                try:
                    running.wait(TERMINATION_S)
                except subprocess.TimeoutExpired:
                    running.kill()
    if failed:
        print(f"failed, or above a limit: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
