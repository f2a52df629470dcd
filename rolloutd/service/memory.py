"""Memory of processes, each page divided among those that share it (PSS)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path


def memory_bytes(pids: Iterable[int]) -> int:
    """Return the proportional set size of processes; one that is gone counts as nothing."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError), Path(f"/proc/{pid}/smaps_rollup").open() as file:
            total += sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    return total
