"""A thread that follows one node's log and resumes after an interruption."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rolloutd.control.client import ApiError, Client, DaemonUnreachable, api_path
from tui.connection.event_stream import MALFORMED

BATCH_INTERVAL_S = 0.1
"""Lines that arrive within one interval are delivered together, about once a frame."""

MAX_BATCH_LINES = 2_000

RECONNECT_DELAY_S = 1.0

UNREACHABLE = "the daemon is unreachable"

OnLines = Callable[[Sequence[dict[str, Any]]], None]


class LogReader:
    """Reads the log of one attempt and follows it to its end."""

    def __init__(
        self,
        client: Client,
        path: Sequence[str],
        attempt: int | None,
        on_lines: OnLines,
        dispatch: Callable[..., Any],
    ) -> None:
        self._client = client
        self._path = api_path(*path)
        self._attempt = attempt
        self._on_lines = on_lines
        self._dispatch = dispatch
        self._stopped = threading.Event()
        self._offset = 0
        self.status = "reading"

    def start(self) -> None:
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def stop(self) -> None:
        """Deliver no more lines."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._follow_log()
                self.status = "ended"
            except DaemonUnreachable:
                self.status = UNREACHABLE
            except ApiError as error:
                self.status = str(error)
            except MALFORMED as error:
                self.status = f"the daemon's answer is malformed: {error!r}"
            self._emit([])
            if self.status != UNREACHABLE:
                return
            self._stopped.wait(RECONNECT_DELAY_S)

    def _follow_log(self) -> None:
        query = {"offset": self._offset, "attempt": self._attempt, "follow": True}
        batch: list[dict[str, Any]] = []
        last = time.monotonic()
        flush = threading.Timer(0, lambda: None)
        lock = threading.Lock()

        def emit_batch() -> None:
            nonlocal batch, last
            with lock:
                ready, batch, last = batch, [], time.monotonic()
            if ready:
                self._emit(ready)

        try:
            with contextlib.closing(self._client.stream(self._path, query)) as lines:
                for line in lines:
                    if self._stopped.is_set():
                        return
                    self.status = "live"
                    self._offset = line["offset"]
                    with lock:
                        batch.append(line)
                        is_full = len(batch) >= MAX_BATCH_LINES
                    if is_full:
                        emit_batch()
                    elif not flush.is_alive():
                        # The stream blocks until the next line, so a timer must deliver the last ones.
                        delay = max(0.01, BATCH_INTERVAL_S - (time.monotonic() - last))
                        flush = threading.Timer(delay, emit_batch)
                        flush.daemon = True
                        flush.start()
        finally:
            flush.cancel()
            emit_batch()

    def _emit(self, log_lines: list[dict[str, Any]]) -> None:
        if not self._stopped.is_set():
            # The console may have ended meanwhile, and its loop with it.
            with contextlib.suppress(RuntimeError):
                self._dispatch(self._on_lines, log_lines)
