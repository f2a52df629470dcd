"""The codecs of rows: which columns hold each kind of row, for the writer and the queries alike.

A column has the name of its field, unless the table says otherwise.  Strings, numbers and flags are columns
as they are; every other value is canonical JSON.  The statements follow from the columns and the key.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache, lru_cache
from itertools import chain, groupby
from operator import attrgetter, itemgetter
from types import MappingProxyType, NoneType
from typing import Any, Final, Generic, TypeVar, cast, get_args, get_type_hints
from zoneinfo import ZoneInfo

from machines.model.configuration import NodeConfiguration
from machines.model.events import (
    ArtifactsBuilt,
    RolloutOpened,
    TeamRulesChanged,
    VerdictCleared,
    VoteWithdrawn,
)
from machines.model.limits import TeamRules
from machines.model.node import Conflict as NodeConflict
from machines.model.node import Node
from machines.model.preparation import Preparation, entry_of_record, entry_record
from machines.model.rollout import (
    Actor,
    Drift,
    Failure,
    FailureCode,
    GateOpening,
    Hold,
    Interruption,
    PilotEvidence,
    Target,
    Vote,
)
from machines.model.rows import (
    ConfigurationDocument,
    Delete,
    Expected,
    NodeConnection,
    NodeRemoval,
    PreparationSnapshot,
    RolloutRow,
    UsedToken,
    Write,
)
from machines.model.step_record import StepRecord
from machines.model.verdict import Verdict
from machines.model.windows import Freeze, Window
from rolloutd.audit_chain import canonical_json
from rolloutd.errors import Conflict, StoreFailed, TokenAlreadyUsed
from rolloutd.ports import DiscoveredNode, SourceAnswer
from rolloutd.store.json_values import from_json, to_json

MAX_PRIOR_CHARS = 1_048_576
"""Characters of what an isolator found; a cut one could not be restored, so a larger one is refused."""

MAX_TEXT_CHARS = 4_000
"""Characters of a stage's text; the run's output has the rest."""

MAX_SNAPSHOT_CHARS = 1_048_576
"""Characters of a node's snapshot: some ten thousand values."""

R = TypeVar("R")

_PLAIN: Final = frozenset({str, int, float, bool, NoneType})

_SHARED: Final = (Actor, tuple[str, ...], tuple[NodeConflict, ...], Mapping[str, str])
"""Types of which many rows have one of few values, so each is decoded once."""

_KEY_EXPRESSIONS: Final = {"attempt": "ifnull(attempt, -1)"}
"""Columns of keys as their index has them."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How a field is stored that is not one column of its own name; `selected`: what a query reads for it."""

    columns: tuple[str, ...]
    encode: Callable[[Any], tuple[Any, ...]] | None = None
    decode: Callable[..., Any] | None = None
    selected: tuple[str, ...] = ()


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
        codecs = [_codec(given.get(each, each), hints.get(each, str)) for each in names]
        selected = [each.selected or tuple(f"{name}.{column}" for column in each.columns) for each in codecs]
        self.kind, self.name, self._has_owner = kind, name, bool(owner)
        self._get = attrgetter(*names)
        encoders = [(at, each.encode) for at, each in enumerate(codecs) if each.encode is not None]
        self._encoders = encoders[::-1]  # from the end, because each may make several columns of one
        decoders = ((at, len(selected[at]), each.decode) for at, each in enumerate(codecs))
        self._decoders = [(at, width, decode) for at, width, decode in decoders if decode is not None]
        columns = [*filter(None, [owner]), *(column for each in codecs for column in each.columns)]
        self._key = [columns.index(column) for column in key.split()]
        self._write_statements(name, columns, key.split())
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
        return [value if value.__class__ in _PLAIN else _encode(value) for value in values]

    def key_of(self, row: R, owner: str = "") -> list[Any]:
        values = self.encode(row, owner)
        return [values[at] for at in self._key]

    def decode(self, columns: Sequence[Any]) -> R:
        values = list(columns)
        for at, width, decode in self._decoders:
            if width == 1:
                values[at] = decode(values[at])
            else:
                values[at : at + width] = (decode(*values[at : at + width]),)
        return self.kind(*values)


class StoredRows:
    """The rows of a database, for the events that change them."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute

    def get(self, kind: type[R], *key: Any) -> R | None:
        table = TABLES[kind]
        found = self._execute(table.select_one, key).fetchone()
        return None if found is None else cast(R, table.decode(found))

    def verdicts_on(self, node: str) -> Iterable[Verdict]:
        return self.load(Verdict, "node = ? AND cleared_at IS NULL", node)

    def load(self, kind: type[R], where: str, *values: Any) -> tuple[R, ...]:
        """Return the rows of a condition, with an order if it has one."""
        table = TABLES[kind]
        return tuple(map(table.decode, self._execute(f"{table.select} WHERE {where}", values)))


def execute_writes(connection: sqlite3.Connection, writes: Iterable[Write | Delete]) -> None:
    """Write rows; raises Conflict when one is not as it is expected."""
    for sql, group in groupby(map(_statement, writes), key=itemgetter(0)):
        rows = [(values, write) for _, values, write in group]
        write, problem = rows[0][1], ""
        try:
            changed = execute_rows(connection, sql, [values for values, _ in rows])
            if isinstance(write, Delete) or changed == len(rows):
                continue
        except sqlite3.IntegrityError as error:
            problem = f" ({error})"
        found = "there already" if getattr(write, "expected", None) is Expected.ABSENT else "not as expected"
        row = f"{TABLES[type(write.row)].name} {'/'.join(map(str, rows[0][0][:2]))}"
        raise (TokenAlreadyUsed if isinstance(write.row, UsedToken) else Conflict)(
            f"{row} is {found}{problem}"
        )


def _statement(write: Write | Delete) -> tuple[str, list[Any], Write | Delete]:
    """Return the statement of a write, which must change one row."""
    table = TABLES[type(write.row)]
    if isinstance(write, Delete):
        return table.delete, table.key_of(write.row, write.owner), write
    values = table.encode(write.row, write.owner)
    if isinstance(write.expected, Expected):
        return table.insert if write.expected is Expected.ABSENT else table.upsert, values, write
    return table.update, values, write


def execute_rows(connection: sqlite3.Connection, sql: str, rows: Sequence[Sequence[Any]]) -> int:
    """Execute one statement for each row and return how many rows changed."""
    try:
        if len(rows) == 1:
            return connection.execute(sql, rows[0]).rowcount
        return connection.executemany(sql, rows).rowcount
    except UnicodeEncodeError:
        # Outside text may contain a lone surrogate, which UTF-8 cannot encode: replace only that.
        return connection.executemany(
            sql, [[_replace_surrogates(value) for value in row] for row in rows]
        ).rowcount


def _replace_surrogates(value: Any) -> Any:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


# -- columns --------------------------------------------------------------------


def _codec(given: str | Codec, hint: Any) -> Codec:
    return given if isinstance(given, Codec) else Codec((given,), decode=_decoder(hint))


def _encode(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if value.__class__ is tuple and all(each.__class__ is str for each in value):
        return _encode_strings(value)
    return canonical_json(to_json(value))


@lru_cache(maxsize=16_384)
def _encode_strings(values: tuple[str, ...]) -> str:
    return canonical_json(values)


@cache
def _decoder(hint: Any) -> Callable[[Any], Any] | None:
    """Return what makes a field of this type from its column; None when the column is the value."""
    inner = next((each for each in get_args(hint) if type(None) in get_args(hint)), hint)
    if inner in (str, int, float):
        return None
    if inner is bool:
        return bool
    if isinstance(inner, type) and issubclass(inner, StrEnum):
        members: dict[str | None, Any] = {None: None, **{each.value: each for each in inner}}
        return members.__getitem__

    def decode(text: str | None) -> Any:
        return None if text is None else from_json(inner, json.loads(text))

    return lru_cache(maxsize=16_384)(decode) if inner in _SHARED else decode


def decode_interruption(by: str | None, reason: str | None, at: float | None) -> Interruption | None:
    return None if by is None or at is None else Interruption(decode_actor(by), reason or "", at)


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
            f"what a step found has {len(text)} characters; more than {MAX_PRIOR_CHARS} are not kept,"
            " and what is not kept could not be restored: the step was not begun"
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


decode_actor = cast(Callable[[str], Actor], _decoder(Actor))


def _decode_failure(
    id_: str | None, node: str, attempt: int, step: str, message: str, at: float, code: str
) -> Failure | None:
    return None if id_ is None else Failure(id_, node, attempt, step, message, at, FailureCode(code))


_DRIFT = Codec(
    ("drift_since", "drift_tasks"),
    lambda drift: (None, "[]") if drift is None else (drift.since, drift.tasks),
    lambda since, tasks: None if since is None else Drift(since, tuple(json.loads(tasks))),
)

# The target's row names its failure, whose own row has the rest.
_FAILURE = Codec(
    ("failure",),
    lambda failure: (None if failure is None else failure.id,),
    _decode_failure,
    tuple(f"failure.{each.name}" for each in fields(Failure)),
)

# A node that is written is in the inventory.
_IDENTITY = Codec(("identity", "gone_at"), lambda identity: (identity, None), json.loads, ("node.identity",))

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
        Table(RolloutOpened, "rollout", "id", _SUBMIT, partial=True),
        Table(
            RolloutRow,
            "rollout",
            "id",
            {"paused": _interruption("paused"), "cancelled": _interruption("cancelled")},
        ),
        Table(
            Target,
            "target",
            "rollout node",
            {"order": "order_kind", "failure": _FAILURE, "drift": _DRIFT},
            source="target LEFT JOIN failure"
            " ON failure.rollout = target.rollout AND failure.id = target.failure",
        ),
        Table(Failure, "failure", "rollout id", owner="rollout"),
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
            PreparationSnapshot,
            "preparation_snapshot",
            "rollout node stage",
            {"before": Codec(("before",), _encode_snapshot, _decode_snapshot)},
        ),
        Table(ArtifactsBuilt, "built_manifest", "rollout stage", {"manifest": _MANIFEST}),
        Table(Vote, "vote", "rollout id", owner="rollout"),
        Table(
            VoteWithdrawn,
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
        Table(UsedToken, "spent_token", "id"),
        Table(GateOpening, "opened", "rollout gate wave", owner="rollout"),
        Table(PilotEvidence, "pilot_evidence", "rollout", owner="rollout"),
        Table(Verdict, "verdicts", "id", {"change": "change_digest"}, present="cleared_at IS NULL"),
        Table(
            VerdictCleared,
            "verdicts",
            "id",
            {"verdict": "id", "at": "cleared_at", "actor": "cleared_by", "reason": "cleared_reason"},
            partial=True,
        ),
        Table(NodeConfiguration, "node_configuration", "node", owner="node"),
        Table(ConfigurationDocument, "configuration", "content"),
        Table(Node, "node", "name", {"identity": _IDENTITY}, present="gone_at IS NULL"),
        Table(NodeConnection, "node", "name"),
        Table(NodeRemoval, "node", "name"),
        Table(Hold, "hold", "node source id"),
        Table(Freeze, "freeze", "id"),
        Table(
            TeamRulesChanged,
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
