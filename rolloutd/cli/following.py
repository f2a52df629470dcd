"""Streams that go on where they stood when the daemon was away for a while.

A daemon that is restarted is away for seconds; whoever watches should not have
to notice.  It knows sequence numbers and offsets, and not what the lines mean.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rolloutd.cli.output import say
from rolloutd.control.client import Client, NoDaemon, StreamLost, path_of

AWAY_LIMIT_S = 120.0
"""A daemon may be away so long before a watcher gives up: an upgrade with its migrations fits in."""

ASK_AGAIN_S = 1.0
"""Between two tries to reach a daemon that is away."""

Line = dict[str, Any]


def follow_entries(
    client: Client, rollout: str | None, after: int | None, over: threading.Event | None = None
) -> Iterator[Line]:
    """Yield the event stream's lines until it is `over`; without `after`, from now on."""
    position = after

    def connect() -> Iterator[Line]:
        return client.stream(path_of("events"), {"after": position, "rollout": rollout, "follow": True})

    for line in resumed(connect, ends=False, over=over):
        if line.get("seq") is not None:
            position = line["seq"]
        elif line.get("heartbeat") is not None:
            position = max(position or 0, line["heartbeat"])
        yield line


def follow_log(client: Client, rollout: str, node: str, attempt: int | None) -> Iterator[Line]:
    """Yield the lines of a node's log until its run has ended."""
    offset = 0

    def connect() -> Iterator[Line]:
        query = {"offset": offset, "attempt": attempt, "follow": True}
        return client.stream(path_of("rollouts", rollout, "nodes", node, "log"), query)

    for line in resumed(connect, ends=True):
        offset = line.get("offset", offset)
        yield line


def resumed(
    connect: Callable[[], Iterator[Line]], *, ends: bool, over: threading.Event | None = None
) -> Iterator[Line]:
    """Yield the lines of a stream that is connected again when it breaks off.

    The first connection must succeed: raises NoDaemon, Answer.  A stream that
    `ends` is over when the daemon closes it in good order.  Once `over` is set,
    nothing is connected or said any more.
    """
    over = over or threading.Event()
    began = False
    gone_since: float | None = None
    while True:
        try:
            for line in connect():
                began = True
                if gone_since is not None:
                    say("the daemon is back")
                    gone_since = None
                yield line
            if ends:
                return
            lost: NoDaemon = NoDaemon("the daemon keeps closing the stream")
        except StreamLost as broken:
            lost = broken
        except NoDaemon as none:
            if not began:
                raise
            lost = none
        if over.is_set():
            return
        began = True
        if gone_since is None:
            gone_since = time.monotonic()
            say("the daemon is away; waiting for it")
        if time.monotonic() - gone_since > AWAY_LIMIT_S:
            raise lost
        over.wait(ASK_AGAIN_S)
