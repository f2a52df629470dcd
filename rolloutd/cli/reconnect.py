"""Streams that resume after the daemon was away, as in a restart.

It knows sequence numbers and offsets, not what the lines mean.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rolloutd.cli.output import print_message
from rolloutd.control.client import Client, DaemonUnreachable, StreamInterrupted, api_path

RECONNECT_TIMEOUT_S = 120.0
"""How long a watcher waits for the daemon: long enough for an upgrade with migrations."""

RECONNECT_INTERVAL_S = 1.0
"""Pause between two attempts to connect."""

Line = dict[str, Any]


def follow_events(
    client: Client, rollout: str | None, after: int | None, stop: threading.Event | None = None
) -> Iterator[Line]:
    """Yield the event stream's lines until `stop` is set; without `after`, from now on."""
    position = after

    def connect() -> Iterator[Line]:
        return client.stream(api_path("events"), {"after": position, "rollout": rollout, "follow": True})

    for line in with_reconnect(connect, is_finite=False, stop=stop):
        if line.get("seq") is not None:
            position = line["seq"]
        elif line.get("heartbeat") is not None:
            position = max(position or 0, line["heartbeat"])
        yield line


def follow_log(
    client: Client, rollout: str, node: str, attempt: int | None, stage: str | None = None
) -> Iterator[Line]:
    """Yield the lines of a node's log, or of its prepare stage, until the run has ended."""
    offset = 0

    def connect() -> Iterator[Line]:
        query = {"offset": offset, "attempt": attempt, "stage": stage, "follow": True}
        return client.stream(api_path("rollouts", rollout, "nodes", node, "log"), query)

    for line in with_reconnect(connect, is_finite=True):
        offset = line.get("offset", offset)
        yield line


def with_reconnect(
    connect: Callable[[], Iterator[Line]], *, is_finite: bool, stop: threading.Event | None = None
) -> Iterator[Line]:
    """Yield the lines of a stream, and reconnect when it breaks.

    The first connection must succeed: raises DaemonUnreachable, ApiError.  A finite
    stream ends when the daemon closes it.  Once `stop` is set, it does not reconnect.
    """
    stop = stop or threading.Event()
    has_connected = False
    lost_since: float | None = None
    while True:
        try:
            for line in connect():
                has_connected = True
                if lost_since is not None:
                    print_message("the daemon is back")
                    lost_since = None
                yield line
            if is_finite:
                return
            last_error: DaemonUnreachable = DaemonUnreachable("the daemon keeps closing the stream")
        except StreamInterrupted as broken:
            last_error = broken
        except DaemonUnreachable as none:
            if not has_connected:
                raise
            last_error = none
        if stop.is_set():
            return
        has_connected = True
        if lost_since is None:
            lost_since = time.monotonic()
            print_message("the daemon is away; waiting for it")
        if time.monotonic() - lost_since > RECONNECT_TIMEOUT_S:
            raise last_error
        stop.wait(RECONNECT_INTERVAL_S)
