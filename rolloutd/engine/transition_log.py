"""One log line per transition, with its cause.

The message says what happened; actor, cause, rollout and node are fields for searches of the journal.
Like the audit, it contains no connection, no output and no variable.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from machines.model.events import (
    ArtifactsBuilt,
    ConfigurationPruned,
    DaemonStarted,
    Event,
    FreezeLifted,
    FreezeStarted,
    GateOpened,
    HoldReleased,
    HoldTaken,
    IsolationReleased,
    MismatchSettled,
    NodeCleaned,
    NodeOrdered,
    NodesDiscovered,
    NodesRemoved,
    PhaseMoved,
    PilotEvidenceAttached,
    PreparationRecorded,
    RequestDenied,
    RolloutCancelled,
    RolloutDeleted,
    RolloutEnded,
    RolloutOpened,
    RolloutPaused,
    RolloutResumed,
    RunOutputPruned,
    SettingsChanged,
    SoakRestarted,
    TargetsJoined,
    VoteCast,
    VoteWithdrawn,
)
from machines.model.preparation import Preparation, PreparationState
from machines.model.rollout import Actor
from machines.model.timefmt import format_duration, format_rfc3339
from machines.states import Phase
from rolloutd.text import pluralize

log = logging.getLogger("rolloutd.transition")

MAX_TEXT_CHARS = 500
"""Characters of a cause in a log line; the audit has all of it."""


def log_events(events: Sequence[Event], actor: Actor, cause: str) -> None:
    if not log.isEnabledFor(logging.INFO):
        return
    for event in events:
        text = describe_event(event)
        if not text:
            continue
        level = logging.WARNING if _is_warning(event) else logging.INFO
        log.log(
            level,
            "%s [%s]",
            text[:MAX_TEXT_CHARS],
            cause[:MAX_TEXT_CHARS],
            extra=_log_fields(event, actor, cause),
        )


def _is_warning(event: Event) -> bool:
    match event:
        case PhaseMoved():
            return event.target is Phase.FAILED
        case PreparationRecorded():
            return event.preparation.state is PreparationState.FAILED
        case _:
            return isinstance(event, RequestDenied)


def describe_event(event: Event) -> str:
    """Return the event in one line; the empty string when it belongs only in the audit."""
    match event:
        case PhaseMoved():
            return _describe_transition(event)
        case GateOpened():
            return f"{event.rollout}: gate {event.gate.value}{_wave_suffix(event.wave)} is open"
        case PilotEvidenceAttached():
            return f"{event.rollout}: the evidence of the pilot {event.node} waits at the start gate"
        case VoteCast():
            vote = event.vote
            said = "yes" if vote.yes else "no"
            return f"{event.rollout}: {vote.actor.name} voted {said} at {vote.gate.value}: {vote.reason}"
        case VoteWithdrawn():
            return f"{event.rollout}: {event.actor.name} took a vote back: {event.reason}"
        case RolloutOpened():
            return f"{event.rollout}: submitted with {pluralize(len(event.targets), 'node')}"
        case TargetsJoined():
            return f"{event.rollout}: {pluralize(len(event.targets), 'node')} joined"
        case RolloutPaused() | RolloutResumed() | RolloutCancelled():
            verb = type(event).__name__.removeprefix("Rollout").lower()
            return f"{event.rollout}: {verb} by {event.actor.name}: {event.reason}"
        case RolloutEnded():
            return f"{event.rollout}: every node is done"
        case RolloutDeleted():
            return f"{event.rollout}: deleted by {event.actor.name}"
        case NodeOrdered() if event.order is not None:
            return (
                f"{event.rollout}/{event.node}: {event.order.value} ordered by"
                f" {event.actor.name}: {event.reason}"
            )
        case _:
            return _describe_fleet_event(event)


def _describe_fleet_event(event: Event) -> str:
    match event:
        case NodesDiscovered():
            return f"the inventory reported {pluralize(len(event.nodes), 'new or changed node')}"
        case NodesRemoved():
            return f"the inventory no longer has {pluralize(len(event.names), 'node')}"
        case RequestDenied():
            return f"{event.actor.name} was refused {event.call}: {event.why}"
        case DaemonStarted():
            return f"rolloutd {event.version} started, epoch {event.epoch}"
        case RunOutputPruned():
            runs = pluralize(event.runs, "run")
            return (
                f"{event.rollout}: output of {runs} is removed, {format_duration(event.keep_s)} after its end"
            )
        case PreparationRecorded():
            return _describe_preparation(event.preparation)
        case ArtifactsBuilt():
            artifacts = pluralize(len(event.manifest), "artifact")
            return f"{event.rollout}: prepare stage {event.stage} built {artifacts}"
        case SettingsChanged():
            return f"settings changed: {', '.join(event.changed)}"
        case MismatchSettled():
            return f"{event.subject}: settled by the {event.kept} by {event.actor.name}: {event.reason}"
        case _:
            return _describe_lock_event(event)


def _describe_preparation(row: Preparation) -> str:
    """Return how a stage ended; its beginning and progress are too many, a disturbance is a transition."""
    subject = f"{row.rollout}/{row.node}" if row.node else row.rollout
    text = f"{subject}: prepare stage {row.stage} {row.state}"
    match row.state:
        case PreparationState.DONE | PreparationState.SKIPPED if row.node:  # a build has ArtifactsBuilt
            return f"{text}: {row.text}" if row.text else text
        case PreparationState.FAILED:
            return f"{text} in try {row.attempt}: {row.text}; next try at {format_rfc3339(row.not_before)}"
        case _:
            return ""


def _describe_lock_event(event: Event) -> str:
    match event:
        case HoldTaken():
            hold = event.hold
            return f"{hold.node}: held as {hold.source}/{hold.id} by {hold.actor.name}: {hold.reason}"
        case HoldReleased():
            text = f"{event.node}: hold {event.source}/{event.id} released by {event.actor.name}"
            return _with_reason(text, event.reason)
        case FreezeStarted():
            return f"frozen: {event.freeze.scope}: {event.freeze.reason}"
        case FreezeLifted():
            text = f"freeze {event.freeze} of {event.scope} lifted by {event.actor.name}"
            return _with_reason(text, event.reason)
        case ConfigurationPruned():
            keep = format_duration(event.keep_s)
            return f"{event.node}: its configuration records are removed, {keep} after it left the inventory"
        case NodeCleaned():
            return f"{event.node}: removed what ended rollouts left: {', '.join(event.removed) or 'nothing'}"
        case IsolationReleased():
            return f"{event.node}: returned to service by {event.kind}: no hold is left"
        case SoakRestarted():
            return f"{event.rollout}/{event.node}: soaks from now: the clock was set back"
        case _:
            # Steps are too many for the log; the transitions that follow from them are logged.
            return ""


def _describe_transition(event: PhaseMoved) -> str:
    text = f"{event.rollout}/{event.node}: {event.source} -> {event.target} ({event.trigger})"
    if event.outcome is not None:
        text += f" as {event.outcome.value}"
    if event.failure is not None:
        return f"{text}: {event.failure.step}: {event.failure.message}"
    return f"{text}: {event.text}" if event.text else text


def _with_reason(text: str, reason: str) -> str:
    return f"{text}: {reason}" if reason else text


def _wave_suffix(wave: str) -> str:
    return f" after {wave}" if wave else ""


def _log_fields(event: Event, actor: Actor, cause: str) -> dict[str, Any]:
    named = {"rollout": getattr(event, "rollout", None), "node": getattr(event, "node", None)}
    if isinstance(event, PreparationRecorded):
        named = {"rollout": event.preparation.rollout, "node": event.preparation.node}
    if isinstance(event, HoldTaken):
        named["node"] = event.hold.node
    if isinstance(event, PhaseMoved):
        named |= {
            "phase": event.target.value,
            "trigger": event.trigger.value,
            "attempt": str(event.attempt),
        }
    fields = {"event": type(event).__name__, "actor": actor.name, "cause": cause[:MAX_TEXT_CHARS]}
    return fields | {name: value for name, value in named.items() if value}
