"""Lines for watchers: one per important event, one per change of a rollout's state."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rolloutd.cli.output import format_percent, print_now, sanitize
from rolloutd.cli.queries import format_fraction, format_reason
from rolloutd.cli.watch_updates import WatchUpdate
from rolloutd.control import event_text

if TYPE_CHECKING:
    from rolloutd.control.wire import Rollout

PRINTED_EVENTS = frozenset(
    {
        "PhaseMoved",
        "VoteCast",
        "VoteWithdrawn",
        "GateOpened",
        "RolloutPaused",
        "RolloutResumed",
        "RolloutCancelled",
        "TargetsJoined",
    }
)
"""Events that get a line; the steps between them are in the audit."""


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


def print_updates(updates: Iterator[WatchUpdate]) -> list[Rollout]:
    """Print lines until all rollouts have ended; return their last state."""
    printer = EventPrinter()
    last: list[Rollout] = []
    for update in updates:
        printer.print_update(update)
        last = update.rollouts
        if update.is_finished:
            break
    return last


def event_lines(update: WatchUpdate) -> Iterator[str]:
    """Yield one line for each important event."""
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
