"""The schema: which columns hold each kind of row, and which of them follow from the audit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final
from zoneinfo import ZoneInfo

from machines.model import events, rollout, rows
from machines.model.configuration import NodeConfiguration
from machines.model.limits import TeamRules
from machines.model.node import NO_IDENTITY, Node
from machines.model.preparation import Preparation, entry_of_record, entry_record
from machines.model.reboots import RebootApproval
from machines.model.step_record import StepRecord
from machines.model.train import Train
from machines.model.windows import Freeze, Window
from rolloutd.audit.audit_chain import canonical_json
from rolloutd.errors import StoreFailed
from rolloutd.ports import DiscoveredNode, SourceAnswer
from rolloutd.store.codec import Codec, Table, decode_actor

MAX_PRIOR_CHARS = 1_048_576
"""Characters of what an isolator found; a cut one could not be restored, so a larger one is refused."""

MAX_TEXT_CHARS = 4_000
"""Characters of a stage's text; the run's output has the rest."""

MAX_SNAPSHOT_CHARS = 1_048_576
"""Characters of a node's snapshot: some ten thousand values."""


def decode_interruption(by: str | None, reason: str | None, at: float | None) -> rollout.Interruption | None:
    return None if by is None or at is None else rollout.Interruption(decode_actor(by), reason or "", at)


def _interruption(prefix: str) -> Codec:
    return Codec(
        (f"{prefix}_by", f"{prefix}_reason", f"{prefix}_at"),
        lambda each: (None, None, None) if each is None else (each.by, each.reason, each.at),
        decode_interruption,
    )


def _encode_prior(prior: Any) -> tuple[str]:
    text = canonical_json(prior)
    if len(text) > MAX_PRIOR_CHARS:
        raise StoreFailed(
            f"isolator: the state to restore has {len(text)} characters, at most {MAX_PRIOR_CHARS} are"
            " stored; the step was not begun"
        )
    return (text,)


def _encode_snapshot(before: Mapping[str, str]) -> tuple[str]:
    return (canonical_json(dict(before))[:MAX_SNAPSHOT_CHARS],)


def _decode_snapshot(text: str) -> Mapping[str, str] | None:
    """Return a stored snapshot; one that was too large to keep whole counts as none."""
    try:
        found: Mapping[str, str] = json.loads(text)
        return found
    except ValueError:
        return None


def _encode_windows(windows: Sequence[Window]) -> tuple[str]:
    return (
        canonical_json(
            [
                {
                    "days": sorted(each.days),
                    "from": each.start_minute,
                    "to": each.end_minute,
                    "zone": each.zone.key,
                }
                for each in windows
            ]
        ),
    )


def _decode_windows(text: str) -> tuple[Window, ...]:
    return tuple(
        Window(frozenset(each["days"]), each["from"], each["to"], ZoneInfo(each["zone"]))
        for each in json.loads(text)
    )


def _decode_failure(
    id_: str | None, node: str, attempt: int, step: str, message: str, at: float, code: str
) -> rollout.Failure | None:
    return (
        None
        if id_ is None
        else rollout.Failure(id_, node, attempt, step, message, at, rollout.FailureCode(code))
    )


def _decode_identity(text: str) -> Mapping[str, str]:
    identity: Mapping[str, str] = NO_IDENTITY if text == "{}" else json.loads(text)
    return identity


_DRIFT = Codec(
    ("drift_since", "drift_tasks"),
    lambda drift: (None, "[]") if drift is None else (drift.since, drift.tasks),
    lambda since, tasks: None if since is None else rollout.Drift(since, tuple(json.loads(tasks))),
)

# The target's row names its failure, whose own row has the rest.
_FAILURE = Codec(
    ("failure",),
    lambda failure: (None if failure is None else failure.id,),
    _decode_failure,
    tuple(f"failure.{each.name}" for each in fields(rollout.Failure)),
)

# A node that is written is in the inventory.
_IDENTITY = Codec(
    ("identity", "gone_at"), lambda identity: (identity, None), _decode_identity, ("node.identity",)
)

_MANIFEST = Codec(
    ("manifest",),
    lambda manifest: (canonical_json([entry_record(each) for each in manifest]),),
    lambda text: tuple(map(entry_of_record, json.loads(text))),
)

_WINDOWS = Codec(("windows",), _encode_windows, _decode_windows)

_SUBMIT: Mapping[str, str | Codec] = {
    "rollout": "id",
    "name": "name",
    "content": "content",
    "source": "source",
    "digest.change": "change_digest",
    "digest.scope": "scope_digest",
    "digest.policy": "policy_digest",
    "digest.whole": "digest",
    "selector_digest": "selector_digest",
    "submitted_by": "submitted_by",
    "at": "submitted_at",
    "targets": Codec(("approved_count",), lambda targets: (len(targets),)),
    "supersedes": "supersedes",
    "overrides": "overrides",
    "override_reason": "override_reason",
}

# -- the tables -----------------------------------------------------------------

TABLES: Final[Mapping[type[Any], Table[Any]]] = {
    each.kind: each
    for each in (
        Table(events.RolloutOpened, "rollout", "id", _SUBMIT, partial=True),
        Table(
            rows.RolloutRow,
            "rollout",
            "id",
            {"paused": _interruption("paused"), "cancelled": _interruption("cancelled")},
        ),
        Table(
            rollout.Target,
            "target",
            "rollout node",
            {"order": "order_kind", "failure": _FAILURE, "drift": _DRIFT},
            source="target LEFT JOIN failure"
            " ON failure.rollout = target.rollout AND failure.id = target.failure",
        ),
        Table(rollout.Failure, "failure", "rollout id", owner="rollout"),
        Table(
            StepRecord,
            "step",
            "rollout node attempt step action number",
            {"prior": Codec(("prior",), _encode_prior, json.loads)},
        ),
        Table(
            Preparation,
            "preparation",
            "rollout node stage",
            {
                "text": Codec(("text",), lambda text: (text[:MAX_TEXT_CHARS],)),
                # The snapshot has a table of its own.
                "before": Codec((), lambda _: (), lambda: None),
            },
        ),
        Table(
            rows.PreparationSnapshot,
            "preparation_snapshot",
            "rollout node stage",
            {"before": Codec(("before",), _encode_snapshot, _decode_snapshot)},
        ),
        Table(events.ArtifactsBuilt, "built_manifest", "rollout stage", {"manifest": _MANIFEST}),
        Table(rollout.Vote, "vote", "rollout id", owner="rollout"),
        Table(
            events.VoteWithdrawn,
            "vote",
            "rollout id",
            {
                "rollout": "rollout",
                "vote": "id",
                "at": "withdrawn_at",
                "actor": "withdrawn_by",
                "reason": "withdrawn_reason",
            },
            partial=True,
        ),
        Table(rows.UsedToken, "spent_token", "id"),
        Table(rollout.GateOpening, "opened", "rollout gate wave", owner="rollout"),
        Table(rollout.PilotEvidence, "pilot_evidence", "rollout", owner="rollout"),
        Table(rollout.Verdict, "verdicts", "id", {"change": "change_digest"}, present="cleared_at IS NULL"),
        Table(
            events.VerdictCleared,
            "verdicts",
            "id",
            {"verdict": "id", "at": "cleared_at", "actor": "cleared_by", "reason": "cleared_reason"},
            partial=True,
        ),
        Table(NodeConfiguration, "node_configuration", "node", owner="node"),
        Table(rows.ConfigurationDocument, "configuration", "content"),
        Table(Node, "node", "name", {"identity": _IDENTITY}, present="gone_at IS NULL"),
        Table(rows.NodeConnection, "node", "name"),
        Table(rows.NodeRemoval, "node", "name"),
        Table(rollout.Hold, "hold", "node source id"),
        Table(Freeze, "freeze", "id"),
        Table(Train, "train", "name"),
        Table(RebootApproval, "reboot_approval", "id", {"group": "machine_group"}),
        Table(
            events.TeamRulesChanged,
            "team_rules",
            "team",
            {
                "rules.team": "team",
                "rules.windows": _WINDOWS,
                "rules.canaries": "canaries",
                "actor": "set_by",
                "at": "at",
            },
            partial=True,
        ),
        Table(TeamRules, "team_rules", "team", {"windows": _WINDOWS}),
        Table(SourceAnswer, "source", "name", {"source": "name", "answered_at": "answered_at"}, partial=True),
        Table(DiscoveredNode, "source_node", "source name"),
    )
}

# -- what follows from the audit -------------------------------------------------

KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "rollout": ("id",),
    "target": ("rollout", "node"),
    "failure": ("rollout", "id"),
    "step": ("rollout", "node", "attempt", "step", "action", "number"),
    "pilot_evidence": ("rollout",),
    "preparation": ("rollout", "node", "stage"),
    "built_manifest": ("rollout", "stage"),
    "vote": ("id",),
    "opened": ("rollout", "gate", "wave"),
    "hold": ("node", "source", "id"),
    "freeze": ("id",),
    "train": ("name",),
    "reboot_approval": ("id",),
    "team_rules": ("team",),
    "spent_token": ("id",),
    "node": ("name",),
    "node_configuration": ("node",),
    "verdicts": ("id",),
}
"""The compared tables and their keys; a table comes after those that it refers to."""

ROLLOUT_TABLES: Final = (
    "target",
    "failure",
    "pilot_evidence",
    "preparation",
    "built_manifest",
    "vote",
    "opened",
)
"""Tables whose rows belong to one rollout, but for the steps, which belong to its targets."""

NOT_COMPARED_TABLES: Final[Mapping[str, str]] = {
    "audit": "its own hash chain covers it",
    "term": "a start and a restore raise the epoch, and the nodes' fences refuse a lower one",
    "meta": "it has the fingerprint of the redaction key, which a start compares",
    "audit_checkpoint": "it is signed",
    "audit_base": "it is signed",
    "audit_base_part": "its digest is signed",
    "forecast": "what was forecast decides nothing; the audit has none of it",
    "source": "what sources reported last; the audit has the nodes that are made of it",
    "source_node": "what sources reported last; the audit has the nodes that are made of it",
    "preparation_snapshot": "needed only while the stage runs; the audit has none of it",
    "configuration": "its key is the hash of its document; the audit has the key",
}

NOT_COMPARED_COLUMNS: Final[Mapping[str, Mapping[str, str]]] = {
    "rollout": {"number": "only orders rows", "rows_digest": "the checkpoint's, over rows that are compared"},
    "target": {"steps_digest": "the checkpoint's, over rows that are compared"},
    "failure": {"number": "only orders rows"},
    "opened": {"number": "only orders rows"},
    "vote": {"number": "only orders rows"},
    "step": {"output": "evidence for people; the entry has a hash of it"},
    "node": {"connection": "may hold secrets, which the audit never has; the inventory sets it again"},
}

HASHED_COLUMNS: Final = frozenset({("rollout", "content"), ("pilot_evidence", "content"), ("step", "prior")})
"""Columns of which the audit has only a hash, so they cannot be restored from it."""
