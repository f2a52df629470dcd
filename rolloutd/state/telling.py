"""One log line per transition, with its cause: the audit's shadow for those who read the journal.

What happened is in the message; who, where and why are fields, so that a log
can be searched by node or rollout.  Nothing is told here that the audit keeps
to itself: no connection, no output, no variable.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from machines.events import (
    CallRefused,
    DaemonStarted,
    Event,
    Frozen,
    GateOpened,
    HoldReleased,
    HoldTaken,
    NodeLetGo,
    NodeOrdered,
    NodesGone,
    NodesSeen,
    PhaseMoved,
    RolloutCancelled,
    RolloutDeleted,
    RolloutEnded,
    RolloutOpened,
    RolloutPaused,
    RolloutResumed,
    RunsRemoved,
    SettingsChanged,
    TargetsJoined,
    Unfrozen,
    VoteCast,
    VoteWithdrawn,
)
from machines.moments import span
from machines.rollout import Actor
from machines.states import Phase
from rolloutd.counting import count

log = logging.getLogger("rolloutd.transition")

MAX_TEXT = 500
"""Characters of a sentence in a log line; the whole of it is in the audit."""


def tell(events: Sequence[Event], actor: Actor, cause: str) -> None:
    """Log the events that a person would want to read of."""
    if not log.isEnabledFor(logging.INFO):
        return
    for event in events:
        text = sentence(event)
        if not text:
            continue
        failed = isinstance(event, PhaseMoved) and event.target is Phase.FAILED
        level = logging.WARNING if failed or isinstance(event, CallRefused) else logging.INFO
        log.log(level, "%s [%s]", text[:MAX_TEXT], cause[:MAX_TEXT], extra=_fields(event, actor, cause))


def sentence(event: Event) -> str:
    """Return what happened in one line; the empty string for what the audit alone keeps."""
    match event:
        case PhaseMoved():
            return _move(event)
        case GateOpened():
            return f"{event.rollout}: gate {event.gate.value}{_of_wave(event.wave)} is open"
        case VoteCast():
            vote = event.vote
            said = "yes" if vote.yes else "no"
            return f"{event.rollout}: {vote.actor.name} voted {said} at {vote.gate.value}: {vote.reason}"
        case VoteWithdrawn():
            return f"{event.rollout}: {event.actor.name} took a vote back: {event.reason}"
        case RolloutOpened():
            return f"{event.rollout}: submitted with {count(len(event.targets), 'node')}"
        case TargetsJoined():
            return f"{event.rollout}: {count(len(event.targets), 'node')} joined"
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
            return _of_fleet(event)


def _of_fleet(event: Event) -> str:
    match event:
        case HoldTaken():
            hold = event.hold
            return f"{hold.node}: held as {hold.source}/{hold.id} by {hold.actor.name}: {hold.reason}"
        case HoldReleased():
            return f"{event.node}: hold {event.source}/{event.id} released by {event.actor.name}"
        case Frozen():
            return f"frozen: {event.freeze.scope}: {event.freeze.reason}"
        case Unfrozen():
            return f"freeze {event.freeze} lifted by {event.actor.name}"
        case NodesSeen():
            return f"the inventory told of {count(len(event.nodes), 'new or changed node')}"
        case NodesGone():
            return f"the inventory no longer has {count(len(event.names), 'node')}"
        case CallRefused():
            return f"{event.actor.name} was refused {event.call}: {event.why}"
        case DaemonStarted():
            return f"rolloutd {event.version} took up its work, epoch {event.epoch}"
        case RunsRemoved():
            runs = count(event.runs, "run")
            return f"{event.rollout}: output of {runs} is removed, {span(event.keep_s)} after its end"
        case NodeLetGo():
            return f"{event.node}: put back in service by {event.kind}: nobody holds it any more"
        case SettingsChanged():
            return f"settings changed: {', '.join(event.changed)}"
        case _:
            # Steps and looks are many per node; the moves that follow from them are told.
            return ""


def _move(event: PhaseMoved) -> str:
    text = f"{event.rollout}/{event.node}: {event.source} -> {event.target} ({event.trigger})"
    if event.outcome is not None:
        text += f" as {event.outcome.value}"
    if event.failure is not None:
        return f"{text}: {event.failure.step}: {event.failure.message}"
    return f"{text}: {event.text}" if event.text else text


def _of_wave(wave: str) -> str:
    return f" after {wave}" if wave else ""


def _fields(event: Event, actor: Actor, cause: str) -> dict[str, Any]:
    named = {"rollout": getattr(event, "rollout", None), "node": getattr(event, "node", None)}
    if isinstance(event, HoldTaken):
        named["node"] = event.hold.node
    if isinstance(event, PhaseMoved):
        named |= {
            "phase": event.target.value,
            "trigger": event.trigger.value,
            "attempt": str(event.attempt),
        }
    fields = {"event": type(event).__name__, "actor": actor.name, "cause": cause[:MAX_TEXT]}
    return fields | {name: value for name, value in named.items() if value}
