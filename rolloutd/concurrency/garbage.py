"""When the garbage collector may run: no pass of it stops the loop for as long as a fleet takes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (5_000, 5, 1_000)
"""New objects before a small pass, small passes before one over 30,000, and such passes before a full one.

A pass holds the interpreter, in whatever thread it runs.  By Python's own thresholds, a submit of 100,000
targets had four full passes of 80 to 130 ms on a busy machine; with these, the longest took 12 to 20 ms.
What a full pass finds is not worth it: nearly all objects of the daemon go by their reference counts, and of
30,000 events with ten consoles, 3,400 objects were in cycles, of which the small passes found 3,300.
"""

_computations: set[object] = set()


def tune() -> None:
    """Let the collector run in small passes from now on."""
    gc.set_threshold(*THRESHOLDS)


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no cycles in the body, and leave what it makes to collect_all() if that is much."""
    gc.disable()
    _computations.add(computation := object())
    try:
        yield
    finally:
        _computations.remove(computation)
        # Computations may overlap; only the last one to end turns the collector on again.
        if not _computations:
            # What is left, such as the targets of a submit, has no cycles and goes by itself.  The next pass
            # would be over all of it.  Cycles that others made meanwhile are left too, until collect_all().
            if gc.get_count()[0] > THRESHOLDS[0]:
                gc.freeze()
            gc.enable()


def collect_all() -> None:
    """Collect all cycles; of half a million objects it stops all threads for a tenth of a second."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
