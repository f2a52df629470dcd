"""The state directory of a simulation, and a handler for the daemon's error log."""

from __future__ import annotations

import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rolloutd.engine.state import InvariantViolation
from rolloutd.ports import PostgresqlAddress
from rolloutd.store.sqlite import database
from tests.sim.fault_injection import PlantedError

postgresql: PostgresqlAddress | None = None
"""The database of the simulated daemons, if it is not a file in their state directory."""


class LogErrorHandler(logging.Handler):
    """Reports unexpected errors of the daemon, and refusals by its invariants, as violations."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        """Listen to one line."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, OSError | PlantedError):
            self._report(f"unexpected: {record.getMessage()}: {error!r}")
        refused = isinstance(record.args, tuple) and any(
            isinstance(e, InvariantViolation) for e in record.args
        )
        if refused or "was refused" in record.getMessage():
            self._report(f"refused by the invariants: {record.getMessage()}")


# In memory where the machine has such a place, because syncing costs most.
_memory = Path("/dev/shm")
_parent = _memory if _memory.is_dir() else None


@contextmanager
def collected_state_dirs() -> Iterator[None]:
    """Make the state directories of the body and of its forks in one, which outlives no killed fork."""
    global _parent
    before = _parent
    with tempfile.TemporaryDirectory(prefix="rolloutd-sims-", dir=before) as directory:
        _parent = Path(directory)
        try:
            yield
        finally:
            _parent = before


@contextmanager
def temporary_state_dir() -> Iterator[Path]:
    """Yield a state directory."""
    directory = Path(tempfile.mkdtemp(prefix="rolloutd-sim-", dir=_parent))
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
def capture_errors(handler: LogErrorHandler) -> Iterator[None]:
    """Send the daemon's log only to this handler."""
    logger = logging.getLogger("rolloutd")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
