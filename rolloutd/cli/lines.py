"""What is told of views line by line: one for each event worth one, one for each new standing.

Where no person watches these lines are all there is; above a picture they say
what has led to it.  It knows views, not where they come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rolloutd.cli.output import percentage, printable
from rolloutd.cli.reading import reason_sentence
from rolloutd.cli.views import View
from rolloutd.control import sentences

if TYPE_CHECKING:
    from rolloutd.control.wire import Rollout

TOLD = frozenset(
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
"""Events that are told as a line; the steps between them are in the audit."""


class Teller:
    """Prints a line per event and per change of state."""

    def __init__(self) -> None:
        self._standing: dict[str, tuple[str, str | None]] = {}

    def see(self, view: View) -> None:
        """Print what is new in a view."""
        for text in event_lines(view):
            print(text, flush=True)  # noqa: T201
        for rollout in view.rollouts:
            reason = rollout["reason"]
            now = (rollout["state"], reason["code"] if reason else None)
            if self._standing.get(rollout["rollout"]) != now:
                self._standing[rollout["rollout"]] = now
                print(_standing_line(rollout), flush=True)  # noqa: T201


def tell(seen: Iterator[View]) -> list[Rollout]:
    """Print lines until all rollouts have ended; return the last view's."""
    teller = Teller()
    last: list[Rollout] = []
    for view in seen:
        teller.see(view)
        last = view.rollouts
        if view.over:
            break
    return last


def event_lines(view: View) -> Iterator[str]:
    """Yield one line for each event worth one."""
    for entry in view.entries:
        if entry["event"] in TOLD:
            at = datetime.fromtimestamp(entry["at"]).astimezone().strftime("%H:%M:%S")
            by = "" if entry["event"] == "PhaseMoved" else f"{sentences.actor(entry)} "
            yield printable(f"{at}  {by}{sentences.of_entry(entry)}")


def _standing_line(rollout: Rollout) -> str:
    at = datetime.now(UTC).astimezone().strftime("%H:%M:%S")
    reason = f": {reason_sentence(rollout['reason'])}" if rollout["reason"] else ""
    done = f"{rollout['done']}/{rollout['total']} {percentage(rollout['percent'])}"
    return printable(f"{at}  {rollout['rollout']} {rollout['state']} {done}{reason}")
