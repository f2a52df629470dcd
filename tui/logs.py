"""Follows the log of one node in a thread, from where it stood when the daemon was away."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rolloutd.control.client import Answer, Client, NoDaemon, path_of

GATHER_S = 0.1
"""Lines within so long of each other are told together: as often as a frame is drawn."""

MOST_GATHERED = 2_000
"""Lines told at once; the rest of a long log follows with the next frame."""

AGAIN_S = 1.0
"""Between two tries while the daemon is away."""

Told = Callable[[Sequence[dict[str, Any]]], None]


class LogReader:
    """Reads one attempt's log, and follows it to its end."""

    def __init__(
        self,
        client: Client,
        path: Sequence[str],
        attempt: int | None,
        told: Told,
        hand_over: Callable[..., Any],
    ) -> None:
        self._client = client
        self._path = path_of(*path)
        self._attempt = attempt
        self._told = told
        self._hand_over = hand_over
        self._over = threading.Event()
        self._offset = 0
        self.standing = "reading"

    def start(self) -> None:
        """Begin; the thread never keeps the process alive."""
        threading.Thread(target=self._read, name="log", daemon=True).start()

    def stop(self) -> None:
        """Tell nothing any more."""
        self._over.set()

    def _read(self) -> None:
        while not self._over.is_set():
            try:
                self._follow()
                self.standing = "ended"
            except NoDaemon:
                self.standing = "the daemon is away"
            except Answer as refused:
                self.standing = str(refused)
            self._tell([])
            if self.standing != "the daemon is away":
                return
            self._over.wait(AGAIN_S)

    def _follow(self) -> None:
        query = {"offset": self._offset, "attempt": self._attempt, "follow": True}
        gathered: list[dict[str, Any]] = []
        last = time.monotonic()
        flush = threading.Timer(0, lambda: None)
        guard = threading.Lock()

        def tell() -> None:
            nonlocal gathered, last
            with guard:
                told, gathered, last = gathered, [], time.monotonic()
            if told:
                self._tell(told)

        try:
            with contextlib.closing(self._client.stream(self._path, query)) as lines:
                for line in lines:
                    if self._over.is_set():
                        return
                    self.standing = "live"
                    self._offset = line["offset"]
                    with guard:
                        gathered.append(line)
                        many = len(gathered) >= MOST_GATHERED
                    if many:
                        tell()
                    elif not flush.is_alive():
                        flush = threading.Timer(max(0.01, GATHER_S - (time.monotonic() - last)), tell)
                        flush.daemon = True
                        flush.start()
        finally:
            flush.cancel()
            tell()

    def _tell(self, told: list[dict[str, Any]]) -> None:
        if not self._over.is_set():
            # A console that has ended has nobody left to tell.
            with contextlib.suppress(RuntimeError):
                self._hand_over(self._told, told)
