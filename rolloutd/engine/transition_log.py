"""Log lines for events, with their causes.

The audit alone has frequent events of single nodes.
The message says who did what; actor, cause, rollout and node are fields for searches of the journal.
Like the audit, it contains no connection, no output and no variable.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rolloutd.ports import AuditEntry
from rolloutd.texts.event_text import describe_event

log = logging.getLogger(__name__)

MAX_TEXT_CHARS = 500
"""Characters of a cause in a log line; the audit has all of it."""

AUDIT_ONLY = frozenset({"StepRecorded", "ChangeNeeded", "DeadlineExtended", "DriftRecorded", "TargetChanged"})
"""Events of single nodes that are too frequent for the log; the audit has them."""

_LISTS = {
    "RolloutOpened": "targets",
    "TargetsJoined": "targets",
    "NodesDiscovered": "nodes",
    "NodesRemoved": "names",
}
"""The field with the nodes of an event that may have several entries."""

WITHOUT_ACTOR = frozenset({"PhaseMoved", "NodesDiscovered"})
"""Events whose sentence has a subject of its own; of a transition it names the person."""


def log_entries(entries: Iterable[AuditEntry]) -> None:
    if not log.isEnabledFor(logging.INFO):
        return
    for entry in _join_parts(json.loads(each.text) for each in entries):
        if _is_logged(entry):
            cause = entry["cause"][:MAX_TEXT_CHARS]
            level = logging.WARNING if _is_warning(entry) else logging.INFO
            log.log(
                level, "%s [%s]", _describe(entry)[:MAX_TEXT_CHARS], cause, extra=_log_fields(entry, cause)
            )


def _join_parts(entries: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the entries, with all parts of a large event as one: the audit has 500 nodes in each."""
    last: dict[str, Any] | None = None
    for entry in entries:
        key = _LISTS.get(entry["event"])
        if last is not None:
            if key and (entry["event"], entry["rollout"]) == (last["event"], last["rollout"]):
                last["fields"][key] += entry["fields"][key]
                continue
            yield last
        last = entry
    if last is not None:
        yield last


def _is_logged(entry: Mapping[str, Any]) -> bool:
    if entry["event"] != "PreparationRecorded":
        return entry["event"] not in AUDIT_ONLY
    # Only how a stage ended: a build has ArtifactsBuilt, and a disturbance is a transition.
    state = entry["fields"]["preparation"]["state"]
    return state == "failed" or (entry["node"] is not None and state in ("done", "skipped"))


def _is_warning(entry: Mapping[str, Any]) -> bool:
    match entry["event"]:
        case "PhaseMoved":
            return bool(entry["fields"]["target"] == "failed")
        case "PreparationRecorded":
            return bool(entry["fields"]["preparation"]["state"] == "failed")
        case name:
            return bool(name == "RequestDenied")


def _describe(entry: Mapping[str, Any]) -> str:
    subject = "/".join(filter(None, (entry["rollout"], entry["node"])))
    # The daemon's own work needs no name in its own log.
    is_named = entry["actor"]["kind"] != "daemon" and entry["event"] not in WITHOUT_ACTOR
    text = f"{entry['actor']['name']} {describe_event(entry)}" if is_named else describe_event(entry)
    if entry["event"] == "PhaseMoved":
        # The phases alone do not distinguish a failed soak check from a disturbance.
        text += f" ({entry['fields']['trigger']})"
    return f"{subject}: {text}" if subject else text


def _log_fields(entry: Mapping[str, Any], cause: str) -> dict[str, str]:
    fields = {"event": entry["event"], "actor": entry["actor"]["name"], "cause": cause}
    fields |= {key: entry[key] for key in ("rollout", "node") if entry[key]}
    if entry["event"] == "PhaseMoved":
        moved = entry["fields"]
        fields |= {"phase": moved["target"], "trigger": moved["trigger"], "attempt": str(moved["attempt"])}
    return fields
