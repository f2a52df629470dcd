"""Names that rolloutd 0.1 wrote into audit entries, and today's names.

A stored entry is never rewritten: its hash covers its text.  So each reader
that depends on an entry's names translates them here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EVENTS = {
    "CallRefused": "RequestDenied",
    "Frozen": "FreezeStarted",
    "LookedCurrent": "ChangeNeeded",
    "NodeLetGo": "IsolationReleased",
    "NodesGone": "NodesRemoved",
    "NodesSeen": "NodesDiscovered",
    "RunsRemoved": "RunOutputPruned",
    "TeamSet": "TeamRulesChanged",
    "Unfrozen": "FreezeLifted",
}

_VALUES = {
    "trigger": {"put-back": "isolation-aborted", "reddened": "soak-check-failed"},
    "action": {"look": "inspect", "do": "apply", "undo": "revert", "clear": "clean-up"},
}
"""Values of an entry's fields: of a phase's transition, and of a step."""


def current_event_name(name: str) -> str:
    return _EVENTS.get(name, name)


def stored_event_names(name: str) -> tuple[str, ...]:
    """Return every name under which entries of an event are stored, today's first."""
    current = current_event_name(name)
    return (current, *(old for old, new in _EVENTS.items() if new == current))


def with_current_names(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an entry with today's names; the same object if it has no old ones."""
    fields = entry.get("fields") or {}
    renamed = {key: new for key, names in _VALUES.items() if (new := names.get(fields.get(key, "")))}
    event = current_event_name(entry["event"])
    if event == entry["event"] and not renamed:
        return entry
    return {**entry, "event": event, "fields": {**fields, **renamed}}
