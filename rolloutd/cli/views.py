"""What a watcher sees: rollouts as they stand, each time something has happened.

The event stream is the bell; the state itself is always asked for, so that a
watcher computes nothing that the daemon could contradict.  Bursts are gathered.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rolloutd.cli.following import Line, follow_entries
from rolloutd.control.client import Answer, Client, NoDaemon, path_of

if TYPE_CHECKING:
    from rolloutd.control.wire import Rollout

CLOSED = frozenset({"done", "cancelled"})
"""States that a rollout does not leave."""

GATHER_S = 0.2
"""Events within so long of each other become one view: faster than a person reads."""

WAITING_LINES = 1000
"""Lines kept for a slow terminal; beyond that the stream itself waits, and the daemon keeps the place."""


@dataclass(frozen=True, slots=True)
class View:
    """What has happened since the last view, and how the rollouts stand after it."""

    entries: Sequence[dict[str, Any]]
    rollouts: list[Rollout]

    @property
    def over(self) -> bool:
        """Whether there is nothing more to wait for."""
        return all(rollout["state"] in CLOSED for rollout in self.rollouts)


def views(client: Client, wanted: Sequence[str]) -> Iterator[View]:
    """Yield views for ever, the first at once; raises NoDaemon when the daemon stays away, Answer."""
    lines: queue.Queue[Line | Exception] = queue.Queue(WAITING_LINES)
    only = wanted[0] if len(wanted) == 1 else None
    rollouts = _stand(client, wanted)
    over = threading.Event()
    threading.Thread(target=_listen, args=(client, only, lines, over), name="events", daemon=True).start()
    try:
        yield View((), rollouts)
        while True:
            batch = _gather(lines)
            # A daemon that is away is waited for by the listener, which gives up in the end.
            with suppress(NoDaemon):
                rollouts = _stand(client, wanted)
            entries = [line["entry"] for line in batch if line.get("entry") is not None]
            yield View([entry for entry in entries if entry.get("rollout") in wanted], rollouts)
    finally:
        over.set()


def _stand(client: Client, wanted: Sequence[str]) -> list[Rollout]:
    return [client.get(path_of("rollouts", rollout)) for rollout in wanted]


def _listen(
    client: Client, rollout: str | None, lines: queue.Queue[Line | Exception], over: threading.Event
) -> None:
    try:
        for line in follow_entries(client, rollout, None, over):
            lines.put(line)
            if over.is_set():
                return
    except (NoDaemon, Answer) as ended:
        lines.put(ended)


def _gather(lines: queue.Queue[Line | Exception]) -> list[Line]:
    """Return at least one line, and those that come soon after it."""
    batch = [_checked(lines.get())]
    until = time.monotonic() + GATHER_S
    while len(batch) < WAITING_LINES:
        try:
            batch.append(_checked(lines.get(timeout=max(0.0, until - time.monotonic()))))
        except queue.Empty:
            break
    return batch


def _checked(line: Line | Exception) -> Line:
    if isinstance(line, Exception):
        raise line
    return line
