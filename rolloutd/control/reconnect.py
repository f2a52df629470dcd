"""The loop in which a client reads a stream of the daemon and connects again when it breaks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import TypeVar

from rolloutd.control.client import DaemonUnreachable, StreamInterrupted

RECONNECT_DELAYS_S = (0.1, 0.2, 0.5, 1.0, 2.0)
"""A daemon restart takes seconds; the last delay repeats until the daemon answers."""

T = TypeVar("T")


def read_with_reconnect(
    connect: Callable[[], Generator[T, None, None]],
    report: Callable[[DaemonUnreachable | None], None],
    *,
    stop: threading.Event,
    is_finite: bool = False,
    give_up_after_s: float | None = None,
) -> Iterator[T]:
    """Yield what a stream brings until `stop` is set; a finite stream ends when the daemon closes it.

    `report` gets the problem when the daemon is lost, and None when it is back.  With `give_up_after_s`
    the first connection must succeed: raises DaemonUnreachable.  Raises ApiError.
    """
    has_connected, tries = False, 0
    lost_since: float | None = None
    while not stop.is_set():
        connected_at = time.monotonic()
        try:
            with closing(connect()) as stream:
                for item in stream:
                    # A silent stream brings heartbeats: the wait for an item is never longer than one.
                    if stop.is_set():
                        return
                    has_connected = True
                    if lost_since is not None:
                        lost_since = None
                        report(None)
                    yield item
            if is_finite:
                return
            problem: DaemonUnreachable = StreamInterrupted("the daemon closed the stream")
        except DaemonUnreachable as error:
            problem = error
        has_connected |= isinstance(problem, StreamInterrupted)
        if give_up_after_s is not None and not has_connected:
            raise problem
        if stop.is_set():
            return
        now = time.monotonic()
        if lost_since is None:
            lost_since = now
            report(problem)
        if give_up_after_s is not None and now - lost_since > give_up_after_s:
            raise problem
        # A stream that was open for a while was a good connection: the next try may come at once.
        tries = 0 if now - connected_at > RECONNECT_DELAYS_S[-1] else tries + 1
        stop.wait(RECONNECT_DELAYS_S[min(tries, len(RECONNECT_DELAYS_S) - 1)])
