"""Runs all measurements, one after the other: `make bench`, or `python -m bench NAME ...` for some.

Each is a program of its own beside this file, so that none warms or burdens the
next.  All of them are run, also after one has failed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

LIMIT_S = 1800.0
"""The longest measurement takes minutes; one that takes longer than this hangs."""


def main(wanted: list[str]) -> int:
    """Run the measurements and return 0 when all of them could be made."""
    known = {path.stem: path for path in sorted(HERE.glob("*.py")) if not path.stem.startswith("_")}
    unknown = set(wanted) - known.keys()
    if unknown:
        print(f"no measurement {', '.join(sorted(unknown))}; there is {', '.join(known)}", file=sys.stderr)
        return 2
    failed = []
    for name in wanted or known:
        print(f"-- {name}", flush=True)
        ended = subprocess.run(
            [sys.executable, "-m", f"bench.{name}"], cwd=HERE.parent, timeout=LIMIT_S, check=False
        )
        if ended.returncode:
            failed.append(name)
    if failed:
        print(f"could not be measured: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
