"""The schema: which columns hold each kind of row, and which of them follow from the audit.

The statements follow from the columns and the key.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain, repeat
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar, cast, get_type_hints
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
from rolloutd.store.codec import Codec, column_codec, decode_actor, encode_columns

R = TypeVar("R")

MAX_PRIOR_CHARS = 1_048_576
"""Characters of what an isolator found; a cut one could not be restored, so a larger one is refused."""

MAX_TEXT_CHARS = 4_000
"""Characters of a stage's text; the run's output has the rest."""

MAX_SNAPSHOT_CHARS = 1_048_576
"""Characters of a node's snapshot: some ten thousand values."""

_KEY_EXPRESSIONS: Final = {"attempt": "ifnull(attempt, -1)"}
"""Columns of keys as their index has them."""


class Table(Generic[R]):
    """One kind of row: its columns, the statements on them, and what converts both ways.

    `given` has the fields that are not a column of their own name; of a row that is `partial`, all of them.
    `owner`: the column of Write.owner.  `present`: the condition for rows that have not ended.
    """

    def __init__(
        self,
        kind: type[R],
        name: str,
        key: str,
        given: Mapping[str, str | Codec] = MappingProxyType({}),
        *,
        owner: str = "",
        source: str = "",
        present: str = "",
        partial: bool = False,
    ) -> None:
        names = tuple(given) if partial else tuple(each.name for each in fields(cast(Any, kind)))
        hints = {} if partial else get_type_hints(kind)
        codecs = [column_codec(given.get(each, each), hints.get(each, str)) for each in names]
        selected = [each.selected or tuple(f"{name}.{column}" for column in each.columns) for each in codecs]
        self.kind, self.name, self._has_owner = kind, name, bool(owner)
        self.key = tuple(key.split())
        self._get = attrgetter(*names)
        encoders = [(at, each.encode) for at, each in enumerate(codecs) if each.encode is not None]
        self._encoders = encoders[::-1]  # from the end, because each may make several columns of one
        decoders = ((at, len(selected[at]), each.decode) for at, each in enumerate(codecs))
        self._decoders = [(at, width, decode) for at, width, decode in decoders if decode is not None]
        columns = [*filter(None, [owner]), *(column for each in codecs for column in each.columns)]
        self._key = [columns.index(column) for column in self.key]
        self._write_statements(name, columns, self.key)
        self.select = f"SELECT {', '.join(chain(*selected))} FROM {source or name}"  # noqa: S608
        self.select_one = " AND ".join([f"{self.select} WHERE {self._where}", *filter(None, [present])])

    def _write_statements(self, name: str, columns: Sequence[str], key: Sequence[str]) -> None:
        places = {column: f"?{number}" for number, column in enumerate(columns, 1)}
        changed = [column for column in columns if column not in key]
        conditions = {each: _KEY_EXPRESSIONS.get(each, f"{name}.{each}") for each in key}
        self._where = " AND ".join(f"{condition} = ?" for condition in conditions.values())
        self.delete = f"DELETE FROM {name} WHERE {self._where}"  # noqa: S608
        self.insert = f"INSERT INTO {name} ({', '.join(columns)}) VALUES ({', '.join(places.values())})"  # noqa: S608
        assignments = ", ".join(f"{column} = excluded.{column}" for column in changed)
        self.upsert = f"{self.insert} ON CONFLICT ({', '.join(key)}) DO UPDATE SET {assignments}"
        assignments = ", ".join(f"{column} = {places[column]}" for column in changed)
        where = " AND ".join(f"{condition} = {places[each]}" for each, condition in conditions.items())
        self.update = f"UPDATE {name} SET {assignments} WHERE {where}"  # noqa: S608

    def encode(self, row: R, owner: str = "") -> list[Any]:
        """Return the row's columns; raises TypeError or ValueError for a value that has no JSON form."""
        values = list(self._get(row))
        for at, encode in self._encoders:
            values[at : at + 1] = encode(values[at])
        if self._has_owner:
            values.insert(0, owner)
        return encode_columns(values)

    def key_of(self, row: R, owner: str = "") -> list[Any]:
        values = self.encode(row, owner)
        return [values[at] for at in self._key]

    def decode(self, rows: Sequence[Sequence[Any]]) -> Iterator[R]:
        """Yield the values of rows, column by column: a start reads two hundred thousand rows."""
        columns: list[Iterable[Any]] = list(zip(*rows, strict=True))
        for at, width, decode in self._decoders if rows else ():
            read = columns[at : at + width]
            # A field of no column has the same value in all rows.
            columns[at : at + width] = (map(decode, *read) if read else repeat(decode(), len(rows)),)
        return map(self.kind, *columns) if rows else iter(())


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

# -- the tables, each after those that it refers to ------------------------------

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
        Table(rollout.PilotEvidence, "pilot_evidence", "rollout", owner="rollout"),
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
        Table(rollout.GateOpening, "opened", "rollout gate wave", owner="rollout"),
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
        Table(rows.UsedToken, "spent_token", "id", {"used_at": "spent_at"}),
        Table(Node, "node", "name", {"identity": _IDENTITY}, present="gone_at IS NULL"),
        Table(rows.NodeConnection, "node", "name"),
        Table(rows.NodeRemoval, "node", "name"),
        Table(NodeConfiguration, "node_configuration", "node", owner="node"),
        Table(rows.ConfigurationDocument, "configuration", "content"),
        Table(rollout.Verdict, "verdicts", "id", {"change": "change_digest"}, present="cleared_at IS NULL"),
        Table(
            events.VerdictCleared,
            "verdicts",
            "id",
            {"verdict": "id", "at": "cleared_at", "actor": "cleared_by", "reason": "cleared_reason"},
            partial=True,
        ),
        Table(SourceAnswer, "source", "name", {"source": "name", "answered_at": "answered_at"}, partial=True),
        Table(DiscoveredNode, "source_node", "source name"),
    )
}

# -- what follows from the audit -------------------------------------------------

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

KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    # A vote's id is unique in all rollouts; its table's key has the rollout too, which an event must name.
    each.name: ("id",) if each.name == "vote" else each.key
    for each in TABLES.values()
    if each.name not in NOT_COMPARED_TABLES
}
"""The compared tables and the columns by which the audit names a row."""

ROLLOUT_TABLES: Final = tuple(
    dict.fromkeys(
        each.name
        for each in TABLES.values()
        if each.key[0] == "rollout" and each.name in KEYS and each.kind is not StepRecord
    )
)
"""Compared tables whose rows belong to one rollout, but for the steps, which belong to its targets."""

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
