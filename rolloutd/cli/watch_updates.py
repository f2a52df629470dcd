"""Updates for watchers: the rollouts' state after each burst of events.

The event stream only notifies; the state is requested each time, so that a watcher
computes nothing that the daemon could contradict.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rolloutd.cli.reconnect import Line, follow_events
from rolloutd.control.client import ApiError, Client, DaemonUnreachable, api_path

if TYPE_CHECKING:
    from rolloutd.control.wire import Rollout

CLOSED_STATES = frozenset({"done", "cancelled"})
"""States that a rollout does not leave."""

BATCH_WINDOW_S = 0.2
"""Events within this time become one update: faster than a person reads."""

MAX_QUEUED_LINES = 1000
"""Lines buffered for a slow terminal; beyond that the stream waits."""


@dataclass(frozen=True, slots=True)
class WatchUpdate:
    """The audit entries since the last update, and the rollouts after them."""

    entries: Sequence[dict[str, Any]]
    rollouts: list[Rollout]

    @property
    def is_finished(self) -> bool:
        """Whether every rollout is closed."""
        return all(rollout["state"] in CLOSED_STATES for rollout in self.rollouts)


def watch_updates(client: Client, rollout_ids: Sequence[str]) -> Iterator[WatchUpdate]:
    """Yield updates for ever, the first at once.

    Raises ApiError, and DaemonUnreachable if the daemon stays away.
    """
    lines: queue.Queue[Line | Exception] = queue.Queue(MAX_QUEUED_LINES)
    only = rollout_ids[0] if len(rollout_ids) == 1 else None
    rollouts = _fetch_rollouts(client, rollout_ids)
    stop = threading.Event()
    threading.Thread(
        target=queue_events, args=(client, only, lines, stop), name="events", daemon=True
    ).start()
    try:
        yield WatchUpdate((), rollouts)
        while True:
            batch = next_batch(lines)
            # While the daemon is away, the event thread reconnects; if it gives up, next_batch() raises.
            with suppress(DaemonUnreachable):
                rollouts = _fetch_rollouts(client, rollout_ids)
            entries = [line["entry"] for line in batch if line.get("entry") is not None]
            yield WatchUpdate([entry for entry in entries if entry.get("rollout") in rollout_ids], rollouts)
    finally:
        stop.set()


def _fetch_rollouts(client: Client, rollout_ids: Sequence[str]) -> list[Rollout]:
    return [client.get(api_path("rollouts", rollout)) for rollout in rollout_ids]


def queue_events(
    client: Client, rollout: str | None, lines: queue.Queue[Line | Exception], stop: threading.Event
) -> None:
    """Queue the event stream's lines, or the error that ends it, until `stop` is set."""
    try:
        for line in follow_events(client, rollout, None, stop):
            lines.put(line)
            if stop.is_set():
                return
    except (DaemonUnreachable, ApiError) as ended:
        lines.put(ended)


def next_batch(lines: queue.Queue[Line | Exception], timeout_s: float | None = None) -> list[Line]:
    """Return at least one line, and those that follow within BATCH_WINDOW_S; raises queue.Empty."""
    batch = [_raise_if_error(lines.get(timeout=timeout_s))]
    deadline = time.monotonic() + BATCH_WINDOW_S
    while len(batch) < MAX_QUEUED_LINES:
        try:
            batch.append(_raise_if_error(lines.get(timeout=max(0.0, deadline - time.monotonic()))))
        except queue.Empty:
            break
    return batch


def _raise_if_error(line: Line | Exception) -> Line:
    if isinstance(line, Exception):
        raise line
    return line
