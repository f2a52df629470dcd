"""The event stream, updates for watchers and the lines that they print; streams resume after a restart.

The stream only notifies: the state is requested each time, so that a watcher computes
nothing that the daemon could contradict.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rolloutd.cli.output import print_message, print_now, sanitize
from rolloutd.cli.status import CLOSED_STATES, format_fraction
from rolloutd.cli.why import format_reason
from rolloutd.control.client import ApiError, Client, DaemonUnreachable, api_path
from rolloutd.control.reconnect import read_with_reconnect
from rolloutd.texts import event_text
from rolloutd.texts.formats import format_percent

if TYPE_CHECKING:
    from rolloutd.control.audit.wire_audit import Audit, AuditEntry
    from rolloutd.control.rollouts.wire import Rollout

BATCH_WINDOW_S = 0.2
"""Events within this time become one update: faster than a person reads."""

MAX_QUEUED_LINES = 1000
"""Lines buffered for a slow terminal; beyond that the stream waits."""

PAGE_SIZE = 1000
"""Entries per request: the daemon's maximum."""

RECONNECT_TIMEOUT_S = 120.0
"""How long a watcher waits for the daemon: long enough for an upgrade with migrations."""

Line = dict[str, Any]
EventQueue = queue.Queue[Line | Exception]

PRINTED_EVENTS = frozenset({"PhaseMoved", "GateOpened", "TargetsJoined", *event_text.ROLLOUT_DECISIONS})
"""Events that get a line; the steps between them are in the audit."""


@dataclass(frozen=True, slots=True)
class WatchUpdate:
    """The audit entries since the last update, and the rollouts after them."""

    entries: Sequence[dict[str, Any]]
    rollouts: list[Rollout]

    @property
    def is_finished(self) -> bool:
        return all(rollout["state"] in CLOSED_STATES for rollout in self.rollouts)


def watch_updates(client: Client, rollout_ids: Sequence[str]) -> Iterator[WatchUpdate]:
    """Yield updates for ever, the first at once.

    Raises ApiError, and DaemonUnreachable if the daemon stays away.
    """
    only = rollout_ids[0] if len(rollout_ids) == 1 else None
    rollouts = _fetch_rollouts(client, rollout_ids)
    with event_queue(client, only) as lines:
        yield WatchUpdate((), rollouts)
        while True:
            batch = next_batch(lines)
            # While the daemon is away, the event thread reconnects; if it gives up, next_batch() raises.
            with suppress(DaemonUnreachable):
                rollouts = _fetch_rollouts(client, rollout_ids)
            entries = [line["entry"] for line in batch if line.get("entry") is not None]
            yield WatchUpdate([entry for entry in entries if entry.get("rollout") in rollout_ids], rollouts)


def _fetch_rollouts(client: Client, rollout_ids: Sequence[str]) -> list[Rollout]:
    return [client.get(api_path("rollouts", rollout)) for rollout in rollout_ids]


@contextmanager
def event_queue(client: Client, rollout: str | None) -> Iterator[EventQueue]:
    """Yield a queue with the event stream's lines, or the error that ends it."""
    lines: EventQueue = queue.Queue(MAX_QUEUED_LINES)
    stop = threading.Event()

    def follow() -> None:
        try:
            for line in follow_events(client, rollout, None, stop):
                lines.put(line)
                if stop.is_set():
                    return
        except (DaemonUnreachable, ApiError) as ended:
            lines.put(ended)

    threading.Thread(target=follow, name="events", daemon=True).start()
    try:
        yield lines
    finally:
        stop.set()


def next_batch(lines: EventQueue, timeout_s: float | None = None) -> list[Line]:
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


def follow_events(
    client: Client, rollout: str | None, after: int | None, stop: threading.Event | None = None
) -> Iterator[Line]:
    """Yield the event stream's lines until `stop` is set; without `after`, from now on."""
    position = after

    def connect() -> Generator[list[Line], None, None]:
        query = {"after": position, "rollout": rollout, "follow": True}
        return client.stream_parts(api_path("events"), query)

    for line in _with_reconnect(connect, stop):
        if line.get("seq") is not None:
            position = line["seq"]
        elif line.get("heartbeat") is not None:
            position = max(position or 0, line["heartbeat"])
        yield line


def follow_log(
    client: Client, rollout: str, node: str, attempt: int | None, stage: str | None = None, offset: int = 0
) -> Iterator[Line]:
    """Yield the lines of a node's log, or of its prepare stage, from an offset until the run has ended."""

    def connect() -> Generator[list[Line], None, None]:
        query = {"offset": offset, "attempt": attempt, "stage": stage, "follow": True}
        return client.stream_parts(api_path("rollouts", rollout, "nodes", node, "log"), query)

    for line in _with_reconnect(connect, is_finite=True):
        offset = line.get("offset", offset)
        yield line


def _with_reconnect(
    connect: Callable[[], Generator[list[Line], None, None]],
    stop: threading.Event | None = None,
    *,
    is_finite: bool = False,
) -> Iterator[Line]:
    parts = read_with_reconnect(
        connect,
        lambda problem: print_message(
            f"daemon: {'not reachable; reconnecting' if problem else 'reconnected'}"
        ),
        stop=stop or threading.Event(),
        is_finite=is_finite,
        give_up_after_s=RECONNECT_TIMEOUT_S,
    )
    return (line for part in parts for line in part)


def read_entries(
    client: Client, after: int = 0, limit: int | None = None, **filters: str | None
) -> Iterator[AuditEntry]:
    """Yield the audit's entries after a sequence number, page by page, at most `limit`."""
    remaining = limit
    while remaining is None or remaining > 0:
        size = PAGE_SIZE if remaining is None else min(PAGE_SIZE, remaining)
        page: Audit = client.get(api_path("audit"), {**filters, "after": after, "limit": size})
        exported = page.get("exported")
        if exported and after < exported["through"]:
            where = f"{exported['directory']} (keep.audit); read them with zcat"
            print_message(f"entries up to {exported['through']} are in {where}")
        yield from page["entries"]
        if page["next"] is None:
            return
        after = page["next"]
        remaining = None if remaining is None else remaining - len(page["entries"])


class EventPrinter:
    """Prints a line per event and per change of state."""

    def __init__(self) -> None:
        self._last_states: dict[str, tuple[str, str | None]] = {}

    def print_update(self, update: WatchUpdate) -> None:
        for text in event_lines(update):
            print_now(text)
        for rollout in update.rollouts:
            reason = rollout["reason"]
            current = (rollout["state"], reason["code"] if reason else None)
            if self._last_states.get(rollout["rollout"]) != current:
                self._last_states[rollout["rollout"]] = current
                print_now(_state_line(rollout))


def show_updates(updates: Iterator[WatchUpdate], show: Callable[[WatchUpdate], None]) -> list[Rollout]:
    """Show updates until all rollouts have ended; return their last state."""
    last: list[Rollout] = []
    for update in updates:
        show(update)
        last = update.rollouts
        if update.is_finished:
            break
    return last


def event_lines(update: WatchUpdate) -> Iterator[str]:
    for entry in update.entries:
        if entry["event"] in PRINTED_EVENTS:
            at = datetime.fromtimestamp(entry["at"]).astimezone().strftime("%H:%M:%S")
            by = "" if entry["event"] == "PhaseMoved" else f"{event_text.actor_name(entry)} "
            yield sanitize(f"{at}  {by}{event_text.describe_entry(entry)}")


def _state_line(rollout: Rollout) -> str:
    at = datetime.now(UTC).astimezone().strftime("%H:%M:%S")
    reason = f": {format_reason(rollout['reason'])}" if rollout["reason"] else ""
    done = f"{format_fraction(rollout)} {format_percent(rollout['percent'])}"
    return sanitize(f"{at}  {rollout['rollout']} {rollout['state']} {done}{reason}")
