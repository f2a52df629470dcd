"""Where a simulation runs: a directory for the daemon's state, and an ear for what the daemon logs."""

from __future__ import annotations

import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rolloutd.state import InvariantBroken
from rolloutd.store import database


class Ear(logging.Handler):
    """Hears what the daemon logs as unexpected: an error that nobody thought of is an accusation.

    So is a change of the daemon's own that its invariants refused: they are there for bugs.
    """

    def __init__(self, accuse: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._accuse = accuse

    def emit(self, record: logging.LogRecord) -> None:
        """Listen to one line."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, OSError):
            self._accuse(f"unexpected: {record.getMessage()}: {error!r}")
        refused = isinstance(record.args, tuple) and any(isinstance(e, InvariantBroken) for e in record.args)
        if refused or "was refused" in record.getMessage():
            self._accuse(f"refused by the invariants: {record.getMessage()}")


@contextmanager
def workplace() -> Iterator[Path]:
    """Yield a state directory; in memory where the machine has such a place, because syncing costs most."""
    memory = Path("/dev/shm")
    directory = Path(tempfile.mkdtemp(prefix="rolloutd-sim-", dir=memory if memory.is_dir() else None))
    timeout_s, database.BUSY_TIMEOUT_S = database.BUSY_TIMEOUT_S, 0.0  # nobody waits in real time
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "coroutine .* was never awaited"
            )  # what a dying daemon was poked to
            yield directory / "state"
    finally:
        database.BUSY_TIMEOUT_S = timeout_s
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def heard(ear: Ear) -> Iterator[None]:
    """Let the ear, and nobody else, hear what the daemon logs."""
    logger = logging.getLogger("rolloutd")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(ear)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(ear)
        logger.setLevel(level)
        logger.propagate = propagate
