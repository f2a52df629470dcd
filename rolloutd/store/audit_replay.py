"""Replay of the audit: what the tables must hold, made from the entries alone.

The entries are decoded to events, and their writes go to an empty database, as the daemon's did.  An entry
has hashes in place of a plan's content and of what an isolator found; so the replayed columns hold those too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, Final, get_args
from zoneinfo import ZoneInfo

from machines.facts.apply import UnexpectedRow, writes
from machines.model import events
from machines.model.limits import TeamRules
from machines.model.plan import Digest
from machines.model.rollout import Actor, PilotEvidence, Target
from machines.model.step_record import StepRecord
from machines.model.windows import DAYS, Window
from rolloutd.errors import Conflict
from rolloutd.store.audit_entries import NODES_PER_ENTRY
from rolloutd.store.backend import Connection
from rolloutd.store.codec import from_json
from rolloutd.store.stored_rows import StoredRows, execute_writes, settle_row
from rolloutd.texts.audit_names import with_current_names

Entry = Mapping[str, Any]

_EVENTS: Final[Mapping[str, type[Any]]] = {kind.__name__: kind for kind in get_args(events.Event)}

_WRITES_NOTHING: Final = frozenset(
    kind.__name__ for kind in (*get_args(events.RecordOnlyEvent), events.DaemonStarted)
)
"""Events without rows: they are most of the entries of a quiet daemon, and need no decoding."""


class AuditReplay:
    """Writes entries, one by one and in order, to the tables of an empty database."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._rows = StoredRows(connection)
        self._pending: dict[str, Any] | None = None
        self.unreadable: list[int] = []
        """Sequence numbers of entries that this version cannot decode."""
        self.without_positions: set[tuple[str, str]] = set()
        """Targets (rollout, node) whose entry is of a version that did not record their position."""

        self.count = 0

    def state(self) -> Any:
        """Return what the tables do not have, as JSON: a replay that resumes with it continues this one."""
        return {
            "pending": self._pending,
            "unreadable": self.unreadable,
            "without_positions": sorted(self.without_positions),
        }

    def resume(self, state: Any) -> None:
        self._pending, self.unreadable = state["pending"], list(state["unreadable"])
        self.without_positions = {(rollout, node) for rollout, node in state["without_positions"]}

    def add(self, text: str) -> None:
        """Replay one entry; the parts of a large one are joined first."""
        self.count += 1
        entry = with_current_names(json.loads(text))
        if self._pending is not None and _continues(self._pending, entry):
            self._pending["fields"]["targets"] += entry["fields"]["targets"]
            self._pending["size"] = len(entry["fields"]["targets"])
            return
        self.finish()
        if entry["event"] in ("RolloutOpened", "TargetsJoined"):
            self._pending = {**entry, "size": len(entry["fields"]["targets"])}
        elif entry["event"] not in _WRITES_NOTHING:
            self._apply(entry)

    def finish(self) -> None:
        """Replay the entry whose further parts were awaited."""
        if self._pending is not None:
            entry, self._pending = self._pending, None
            self._apply(entry)

    def _apply(self, entry: Entry) -> None:
        try:
            event = decode_event(entry)
            if isinstance(event, events.MismatchSettled):
                settle_row(self._connection, event, hashed=True)
            else:
                execute_writes(self._connection, writes(event, self._rows, entry["at"]))
        except (Conflict, UnexpectedRow, self._connection.IntegrityError):
            return  # an entry that contradicts earlier ones: the comparison shows what it left
        except (AttributeError, KeyError, LookupError, TypeError, ValueError):
            self.unreadable.append(entry["seq"])
            return
        if isinstance(event, events.RolloutOpened | events.TargetsJoined):
            known = zip(event.targets, entry["fields"]["targets"], strict=True)
            self.without_positions |= {(t.rollout, t.node) for t, each in known if "position" not in each}


def decode_event(entry: Entry) -> events.Event:
    """Return the event of an entry with today's names.

    Raises KeyError, TypeError or ValueError for an entry that this version cannot read.
    """
    kind, content = _EVENTS[entry["event"]], dict(entry["fields"])
    match entry["event"]:
        case "RolloutOpened":
            return _decode_submit(entry["rollout"], content)
        case "TargetsJoined":
            targets = _decode_targets(entry["rollout"], content, joined=True)
            return events.TargetsJoined(entry["rollout"], targets, content["at"])
        case "PilotEvidenceAttached":
            content["content"] = hashed_content(content["content"])
            evidence = from_json(PilotEvidence, content)
            return events.PilotEvidenceAttached(entry["rollout"], entry["node"], evidence)
        case "TeamRulesChanged":
            rules = TeamRules(
                content["team"], tuple(map(_parse_window, content["windows"])), tuple(content["canaries"])
            )
            return events.TeamRulesChanged(rules, from_json(Actor, content["actor"]), "", content["at"])
        case "StepRecorded":
            isolated, given = content.pop("isolated"), content.pop("content", "")
            record = {**content, "rollout": entry["rollout"], "node": entry["node"], "output": ""}
            return events.StepRecorded(from_json(StepRecord, record), isolated, given)
        case _:
            names = {each.name for each in fields(kind)}
            place: dict[str, Any] = {key: entry[key] for key in ("rollout", "node") if key in names}
            decoded: events.Event = from_json(kind, {**content, **place})
            return decoded


def hashed_content(content_hash: str) -> Mapping[str, str]:
    """Return what stands for a plan's content in a replayed row."""
    return {"sha256": content_hash}


def _decode_submit(rollout: str, content: dict[str, Any]) -> events.RolloutOpened:
    return events.RolloutOpened(
        rollout=rollout,
        name=content["name"],
        content=hashed_content(content["content"]) if "content" in content else {},
        source=content["source"],
        digest=from_json(Digest, content["digest"]),
        selector_digest=content["selector_digest"],
        submitted_by=from_json(Actor, content["submitted_by"]),
        at=content["at"],
        targets=_decode_targets(rollout, content, joined=False),
        again=content["again"],
        supersedes=content.get("supersedes"),
        overrides=tuple(content.get("overrides", ())),
        override_reason=content.get("override_reason", ""),
    )


def _decode_targets(rollout: str, content: Mapping[str, Any], *, joined: bool) -> tuple[Target, ...]:
    # Entries of older versions have node, team, pools and wave alone.
    implied = {"rollout": rollout, "position": 0, "since": content["at"], "joined": joined}
    return tuple(from_json(Target, {**implied, **each}) for each in content["targets"])


def _continues(previous: Mapping[str, Any], entry: Entry) -> bool:
    """Return whether the entry is a further part of the event before it."""
    if (previous["event"], previous["rollout"]) != (entry["event"], entry["rollout"]):
        return False
    part = entry["fields"].get("part")
    if part is not None:
        return bool(part > 0)
    # Up to 0.2, a part of TargetsJoined had no number.
    is_full = previous["size"] == NODES_PER_ENTRY
    return is_full and bool(previous["fields"]["at"] == entry["fields"]["at"])


def _parse_window(text: str) -> Window:
    """Return the window that str() wrote: `mon-fri 09:00-16:00 Europe/Amsterdam`."""
    days, hours, zone = text.split(" ", 2)
    start, end = (int(each[:2]) * 60 + int(each[3:]) for each in hours.split("-"))
    return Window(frozenset(_parse_days(days)), start, end, ZoneInfo(zone))


def _parse_days(text: str) -> Iterator[int]:
    first, dash, last = text.partition("-")
    if dash:
        return iter(range(DAYS.index(first), DAYS.index(last) + 1))
    return iter([DAYS.index(day) for day in text.split(",")])
