"""What the audit says of each event: events in, canonical JSON out.

An entry is complete but for its sequence number, which the writer adds inside
the transaction.  Entries may be read by everybody who may ask the daemon
anything, and for ever.  So what can hold a secret stays out of them: how nodes
are reached, what steps put out, what an isolator found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from machines.events import (
    Event,
    HoldTaken,
    NodesGone,
    NodesSeen,
    RolloutOpened,
    StepRecord,
    StepRecorded,
    TargetsJoined,
    TeamSet,
)
from machines.node import Node
from machines.rollout import Actor, Target
from rolloutd.chain import canonical

NODES_PER_ENTRY = 500
"""Nodes that one entry tells of: some 100 KB, what a client takes as one line of a stream."""

MAX_TEXT = 4_000
"""Characters of one sentence of a step; a longer one is evidence and belongs in the output."""


def draft(event: Event, *, actor: Actor, cause: str, at: float, digest: str | None) -> Iterator[str]:
    """Yield the entries of one event, each as canonical JSON without its last key, `seq`, and the bracket.

    Raises ValueError when a value has no JSON form.
    """
    node = _node_of(event)
    for told in _split(event):
        body = {
            "actor": _plain(actor),
            "at": at,
            "cause": cause,
            "digest": digest,
            "event": type(event).__name__,
            "fields": told,
            "node": node,
            "rollout": rollout_of(event),
        }
        yield canonical(body)[:-1]


def numbered(drafted: str, seq: int) -> str:
    """Return the whole entry; `seq` is the last of the keys in canonical order."""
    return f'{drafted},"seq":{seq}}}'


def rollout_of(event: Event) -> str | None:
    """Return the rollout that an event belongs to."""
    if isinstance(event, StepRecorded):
        return event.record.rollout
    rollout: str | None = getattr(event, "rollout", None)
    return rollout


def _node_of(event: Event) -> str | None:
    match event:
        case StepRecorded():
            return event.record.node
        case HoldTaken():
            return event.hold.node
        case _:
            node: str | None = getattr(event, "node", None)
            return node


def _split(event: Event) -> Iterator[Mapping[str, Any]]:
    """Yield what is told of an event, in parts where it tells of many nodes."""
    match event:
        case NodesSeen():
            for part in _parts(event.nodes):
                yield {"nodes": [_node(node) for node in part]}
        case NodesGone():
            for names in _parts(event.names):
                yield {"names": list(names)}
        case RolloutOpened():
            yield from _opened(event)
        case TargetsJoined():
            for targets in _parts(event.targets):
                yield {"at": event.at, "targets": [_target(target) for target in targets]}
        case TeamSet():
            yield {
                "actor": _plain(event.actor),
                "at": event.at,
                "canaries": list(event.rules.canaries),
                "reason": event.reason,
                "team": event.rules.team,
                "windows": [str(window) for window in event.rules.windows],
            }
        case StepRecorded():
            yield {"isolated": event.isolated, **_step(event.record)}
        case _:
            yield {name: _plain(getattr(event, name)) for name in _names(type(event))}


def _opened(event: RolloutOpened) -> Iterator[Mapping[str, Any]]:
    """Tell of a submit; the content is told by its digests, which is what people vote for."""
    for number, targets in enumerate(_parts(event.targets)):
        yield {
            "again": event.again,
            "at": event.at,
            "digest": _plain(event.digest),
            "name": event.name,
            "part": number,
            "selector_digest": event.selector_digest,
            "source": dict(event.source),
            "submitted_by": _plain(event.submitted_by),
            "supersedes": event.supersedes,
            "targets": [_target(target) for target in targets],
        }


def _step(record: StepRecord) -> Mapping[str, Any]:
    """Tell of a step; its output and what an isolator found are told by their hash."""
    return {
        "action": record.action,
        "at": record.at,
        "attempt": record.attempt,
        "began_at": record.began_at,
        "handle": record.handle,
        "number": record.number,
        "output": _hash(record.output) if record.output else None,
        "prior": _hash(canonical(record.prior)) if record.prior is not None else None,
        "stage": record.stage,
        "state": record.state,
        "step": record.step,
        "text": record.text[:MAX_TEXT],
        "visible_to": record.visible_to,
    }


def _node(node: Node) -> Mapping[str, Any]:
    return {"kind": node.kind, "labels": dict(node.labels), "name": node.name, "sources": list(node.sources)}


def _target(target: Target) -> Mapping[str, Any]:
    return {"node": target.node, "pools": list(target.pools), "team": target.team, "wave": target.wave}


def _parts(values: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Cut into parts; nothing at all is one empty part, because the event did happen."""
    for start in range(0, max(1, len(values)), NODES_PER_ENTRY):
        yield values[start : start + NODES_PER_ENTRY]


def _plain(value: Any) -> Any:
    """Return a value of the core as JSON."""
    if value is None or isinstance(value, str | int | float):
        return value
    if is_dataclass(value):
        return {name: _plain(getattr(value, name)) for name in _names(type(value))}
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value]


def _names(kind: type[Any]) -> tuple[str, ...]:
    """Return the names of an event's or value's own fields; node and rollout stand beside them."""
    names = _NAMES.get(kind)
    if names is None:
        hidden = {"rollout", "node"} if kind.__module__ == "machines.events" else set[str]()
        names = _NAMES[kind] = tuple(field.name for field in fields(kind) if field.name not in hidden)
    return names


_NAMES: dict[type[Any], tuple[str, ...]] = {}
"""The names already looked up, one per kind of event or value; fields() is slow."""


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
