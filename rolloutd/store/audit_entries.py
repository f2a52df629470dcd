"""Audit entries: events in, canonical JSON out.

An entry is complete except for its sequence number, which the writer adds inside the transaction.  Entries
are never deleted, and each user who may query the daemon can read them.  So they hold no secrets: no
connection variables, no output of steps, no state that an isolator found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from machines.facts.apply import rollout_of
from machines.model import events
from machines.model.node import Node
from machines.model.rollout import Actor, FailureCode, Target
from machines.model.step_record import MAX_STEP_TEXT_CHARS, StepRecord
from rolloutd.audit.audit_chain import canonical_json
from rolloutd.store.codec import to_json

NODES_PER_ENTRY = 500
"""Nodes per entry: some 100 KB, what a client accepts as one line of a stream."""


def draft_entries(
    event: events.Event, *, actor: Actor, cause: str, at: float, digest: str | None
) -> Iterator[str]:
    """Yield the entries of one event, each as canonical JSON without its last key `seq` and the brace.

    Raises ValueError when a value has no JSON form.
    """
    node, actor_json = _node_of(event), _actor_json(actor)
    for content in _split_fields(event):
        body = {
            "actor": actor_json,
            "at": at,
            "cause": cause,
            "digest": digest,
            "event": type(event).__name__,
            "fields": content,
            "node": node,
            "rollout": rollout_of(event),
        }
        yield canonical_json(body)[:-1]


@lru_cache(maxsize=1_024)  # the daemon writes most entries
def _actor_json(actor: Actor) -> Any:
    return to_json(actor)


def add_sequence_number(draft_text: str, seq: int) -> str:
    """Return the whole entry; `seq` is the last key in canonical order."""
    # Spliced as text: the writer numbers thousands of entries within one transaction.
    return f'{draft_text},"seq":{seq}}}'


def _node_of(event: events.Event) -> str | None:
    match event:
        case events.StepRecorded():
            return event.record.node
        case events.PreparationRecorded():
            return event.preparation.node or None
        case events.HoldTaken():
            return event.hold.node
        case _:
            node: str | None = getattr(event, "node", None)
            return node


def _split_fields(event: events.Event) -> Iterator[Mapping[str, Any]]:
    """Yield the fields of an event, in several parts when it has many nodes."""
    match event:
        case events.NodesDiscovered():
            for part in _chunk(event.nodes):
                yield {"nodes": [_node_fields(node) for node in part]}
        case events.NodesRemoved():
            for names in _chunk(event.names):
                yield {"names": list(names)}
        case events.RolloutOpened():
            yield from _opened_fields(event)
        case events.TargetsJoined():
            for number, targets in enumerate(_chunk(event.targets)):
                # Said even if false, as of a target's new name: a replay takes each without it as joined.
                targets_json = [
                    {**_target_fields(target, event.at), "joined": target.joined} for target in targets
                ]
                yield {"at": event.at, "part": number, "targets": targets_json}
        case events.TeamRulesChanged():
            yield {
                "actor": to_json(event.actor),
                "at": event.at,
                "canaries": list(event.rules.canaries),
                "reason": event.reason,
                "team": event.rules.team,
                "windows": [str(window) for window in event.rules.windows],
            }
        case events.PilotEvidenceAttached():
            evidence = event.evidence
            # A hash and the digest that people vote for replace the content.
            yield {
                "at": evidence.at,
                "content": hash_text(canonical_json(dict(evidence.content))),
                "digest": evidence.digest,
                "pilot_since": evidence.pilot_since,
            }
        case events.PreparationRecorded():
            # The snapshot is large, and of use only while the stage runs.
            yield {"preparation": to_json(replace(event.preparation, before=None))}
        case events.StepRecorded():
            content = {"content": event.content} if event.content else {}
            yield {"isolated": event.isolated, **content, **_step_fields(event.record)}
        case _:
            yield to_json(event)


def _opened_fields(event: events.RolloutOpened) -> Iterator[Mapping[str, Any]]:
    """Yield the fields of a submit; a hash and the digests that people vote for replace the content."""
    content = hash_text(canonical_json(event.content))
    overrides: Mapping[str, Any] = {}
    if event.overrides:
        overrides = {"overrides": list(event.overrides), "override_reason": event.override_reason}
    for number, targets in enumerate(_chunk(event.targets)):
        yield {
            **overrides,
            "again": event.again,
            "at": event.at,
            "content": content,
            "digest": to_json(event.digest),
            "name": event.name,
            "part": number,
            "selector_digest": event.selector_digest,
            "source": dict(event.source),
            "submitted_by": to_json(event.submitted_by),
            "supersedes": event.supersedes,
            "targets": [_target_fields(target, event.at) for target in targets],
        }


def _step_fields(record: StepRecord) -> Mapping[str, Any]:
    """Return the fields of a step; hashes replace its output and the state that the isolator found."""
    rare: dict[str, Any] = {} if record.code is FailureCode.FAILED else {"code": record.code}
    rare |= {"waited_s": record.waited_s} if record.waited_s else {}
    return {
        **rare,
        "action": record.action,
        "at": record.at,
        "attempt": record.attempt,
        "began_at": record.began_at,
        "handle": record.handle,
        "number": record.number,
        "output": hash_text(record.output) if record.output else None,
        "prior": hash_text(canonical_json(record.prior)) if record.prior is not None else None,
        "stage": record.stage,
        "state": record.state,
        "step": record.step,
        "text": record.text[:MAX_STEP_TEXT_CHARS],
        "visible_to": record.visible_to,
    }


def _node_fields(node: Node) -> Mapping[str, Any]:
    rare = {
        name: to_json(value)
        for name in ("conflicts", "identity")
        if (value := getattr(node, name))  # most nodes have neither
    }
    return {
        "kind": node.kind,
        "labels": dict(node.labels),
        "name": node.name,
        "sources": list(node.sources),
        **rare,
    }


def _target_fields(target: Target, at: float) -> Mapping[str, Any]:
    """Return what an audit replay needs of a target that joins at `at`: what a new one does not imply."""
    rare = {
        each.name: to_json(value)
        for each in fields(Target)
        if (value := getattr(target, each.name)) != (at if each.name == "since" else each.default)
    }
    del rare["rollout"]
    return {**rare, "team": target.team}


def _chunk(values: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Split into parts; an empty tuple becomes one empty part, so that the event still has an entry."""
    for start in range(0, max(1, len(values)), NODES_PER_ENTRY):
        yield values[start : start + NODES_PER_ENTRY]


def hash_text(text: str) -> str:
    # A lone surrogate, such as of a file's name, has no UTF-8, and must have a hash all the same.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
