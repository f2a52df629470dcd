"""Each row and each column of the database follows from the audit, or the comparison names it.

The tests read tables and columns from the schema: a new one is compared, or explained, or a test fails.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from machines.model.events import (
    ArtifactsBuilt,
    FreezeStarted,
    GateOpened,
    HoldTaken,
    NodeOrdered,
    NodesDiscovered,
    PilotEvidenceAttached,
    PreparationRecorded,
    RolloutPaused,
    StepRecorded,
    TargetsJoined,
    TeamRulesChanged,
    VerdictCleared,
    VerdictRecorded,
    VoteCast,
)
from machines.model.limits import TeamRules
from machines.model.plan import GateName
from machines.model.preparation import ArtifactKind, ManifestEntry, Preparation, PreparationState
from machines.model.reboots import RebootApproval, RebootsApproved
from machines.model.rollout import Actor, ActorKind, Hold, NodeOrder, PilotEvidence, Verdict
from machines.model.rows import MismatchKind
from machines.model.selector import parse_selector
from machines.model.step_record import StepAction, StepState
from machines.model.train import Train, TrainStored
from machines.model.windows import Freeze, Window
from machines.states import Phase, Trigger
from rolloutd.audit.audit_chain import GENESIS_HASH, canonical_json, hash_entry
from rolloutd.ports import AuditReport, PostgresqlAddress
from rolloutd.store import SqliteBackend, audit_entries, audit_replay, open_store
from rolloutd.store.audit_comparison import compare_with_audit
from rolloutd.store.schema import KEYS, NOT_COMPARED_COLUMNS, NOT_COMPARED_TABLES
from rolloutd.store.sqlite import database
from tests.contracts.store_backends import (
    ALICE,
    moves_to_done,
    node,
    phase_moved,
    plan_of,
    rollout_opened,
    step,
    target,
    vote,
    write,
)

NODES_PER_ENTRY = 3
"""Instead of hundreds: two hundred comparisons read the history."""

JIRA = Actor(ActorKind.SERVICE, "jira:zoe@example.com", 1007)
WINDOWS = (
    Window(frozenset(range(5)), 540, 960, ZoneInfo("Europe/Amsterdam")),
    Window(frozenset({0, 2}), 1320, 1440, ZoneInfo("UTC")),
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a database with a row in each table, written by the store."""
    state_dir = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        for module in (audit_entries, audit_replay):
            patch.setattr(module, "NODES_PER_ENTRY", NODES_PER_ENTRY)
        asyncio.run(write_history(state_dir))
        yield state_dir / database.FILE_NAME


async def write_history(state_dir: Path, postgresql: PostgresqlAddress | None = None) -> None:
    store = await open_store(state_dir, postgresql, compile_plan=plan_of, inline=True)
    await store.sign_audit_checkpoint(1.0, all_rows=True)
    nodes = [f"n{number}" for number in range(NODES_PER_ENTRY + 3)]
    joined = tuple(target(f"j{n}", 1000 + n, joined=True, since=9.0) for n in range(NODES_PER_ENTRY + 2))
    await write(
        store, NodesDiscovered((node("n1", team="payments"), node("n2")), {"n1": {"ansible_password": "x"}})
    )
    await write(store, rollout_opened(nodes=nodes, at=0.0))
    await write(store, TargetsJoined("r1", joined, 9.0))
    await write(store, VoteCast("r1", replace(vote(), actor=JIRA, until=99.0), "token-1", "zoe"))
    evidence = PilotEvidence({"steps": [1]}, "digest-1", 1.0, 2.0)
    await write(store, PilotEvidenceAttached("r1", "n0", evidence))
    await write(store, GateOpened("r1", GateName.START, "", 6.0))
    row = Preparation(
        "r1", "n0", "copy", 1, PreparationState.RUNNING, "c1", 7.0, 7.0, before={"boot-id": "b"}
    )
    await write(store, PreparationRecorded(row))
    entry = ManifestEntry("app", "1", ArtifactKind.FILE, 3, "ab", select=parse_selector("arch=amd64"))
    await write(store, ArtifactsBuilt("r1", "build", (entry,), 7.0))
    await write(store, phase_moved("n1", Trigger.ADMITTED, Phase.PENDING, Phase.ISOLATING))
    begun = step(StepState.INTENDED, prior={"weight": 5}, handle="h1", visible_to="payments")
    await write(store, StepRecorded(begun, isolated=True))
    await write(store, StepRecorded(replace(begun, state=StepState.OK, prior=None, output="done")))
    await write(store, phase_moved("n1", Trigger.FAILED, Phase.ISOLATING, Phase.FAILED))
    await write(store, *moves_to_done("n2")[:2])
    run = step(StepState.INTENDED, "n2", step="run.configure", action=StepAction.RUN)
    await write(store, StepRecorded(run, content="hash-1", document={"commit": "a"}))
    await write(store, *moves_to_done("n2")[2:])
    verdict = Verdict("v1", "change-1", "hash-2", {"role": "db"}, "r1", "n1", "verify.0", "broken", 10.0)
    await write(store, VerdictRecorded("r1", "n1", verdict))
    await write(
        store, VerdictRecorded("r1", "n1", replace(verdict, id="v2")), VerdictCleared("v2", ALICE, "no", 11.0)
    )
    await write(store, NodeOrdered("r1", "n1", NodeOrder.RETURN, ALICE, "please", 11.0))
    await write(store, RolloutPaused("r1", ALICE, "lunch", 12.0))
    await write(store, HoldTaken(Hold("n2", "person", "alice", ALICE, "new disk", 7.0, until=99.0)))
    await write(store, FreezeStarted(Freeze("f1", "team/payments", "sale", "alice", 8.0)))
    train = Train("t1", ("r1", "r2"), 60.0, ALICE, 8.0, {"r1": "alice"})
    await write(store, TrainStored(train, ALICE, "kernel week", 8.0))
    approval = RebootApproval("workers/alice", "workers", ALICE, ("infra",), "patches", 8.0, 99.0)
    await write(store, RebootsApproved(approval))
    await write(store, TeamRulesChanged(TeamRules("payments", WINDOWS, ("n2",)), ALICE, "nights", 8.0))
    await store.close()


@pytest.fixture
def forge(written: Path, tmp_path: Path) -> Callable[[str], AuditReport]:
    """Return a function that changes a copy by SQL, as a user with a shell would, and compares it."""
    copy = tmp_path / database.FILE_NAME

    def run(script: str) -> AuditReport:
        copy.unlink(missing_ok=True)
        with closing(sqlite3.connect(written)) as source, closing(sqlite3.connect(copy)) as edited:
            source.backup(edited)
            edited.execute("PRAGMA ignore_check_constraints = ON")
            edited.executescript(script)
        return compare_with_audit(SqliteBackend(copy))

    return run


def schema_columns() -> dict[str, list[str]]:
    """Return each table of a new database with its columns."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        database.create_tables(connection)
        names = [
            name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
        ]
        return {name: [row[1] for row in connection.execute(f"PRAGMA table_info({name})")] for name in names}


COMPARED = [
    (table, column)
    for table in KEYS
    for column in schema_columns()[table]
    if column not in NOT_COMPARED_COLUMNS.get(table, {})
]


def test_table_not_known_reported() -> None:
    schema = schema_columns()
    assert set(schema) == set(KEYS) | set(NOT_COMPARED_TABLES)
    for table, skipped in NOT_COMPARED_COLUMNS.items():
        assert set(skipped) <= set(schema[table])


def test_untouched_database_agrees(written: Path) -> None:
    report = compare_with_audit(SqliteBackend(written))
    assert (report.mismatches, report.unreadable, report.ok) == ((), (), True)
    with closing(sqlite3.connect(written)) as connection:
        for table in KEYS:
            (rows,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
            assert rows, f"the history leaves {table} empty"


def change_cell(table: str, column: str) -> str:
    """Return SQL that changes one column of a table's first row."""
    other = f"CASE typeof({column}) WHEN 'text' THEN {column} || ' ' WHEN 'null' THEN 1 ELSE {column} + 1 END"
    first = f"rowid = (SELECT min(rowid) FROM {table})"
    if is_without_rowid(table):
        keys = ", ".join(KEYS[table])
        first = f"({keys}) = (SELECT {keys} FROM {table} ORDER BY {keys} LIMIT 1)"
    return f"UPDATE {table} SET {column} = {other} WHERE {first}"


@pytest.mark.parametrize(("table", "column"), COMPARED)
def test_forged_cell_named(forge: Callable[[str], AuditReport], table: str, column: str) -> None:
    report = forge(change_cell(table, column))
    changed = {each.mismatch.kind for each in report.mismatches if each.table == table}
    if column in KEYS[table]:
        assert changed == {MismatchKind.EXTRA, MismatchKind.MISSING}
    else:
        assert [each.mismatch.columns for each in report.mismatches] == [(column,)]


@pytest.mark.parametrize("table", KEYS)
def test_deleted_row_named(forge: Callable[[str], AuditReport], table: str) -> None:
    report = forge(f"DELETE FROM {table}")
    assert {each.mismatch.kind for each in report.mismatches} == {MismatchKind.MISSING}
    assert {each.table for each in report.mismatches} == {table}


VOTE = (
    'INSERT INTO vote SELECT NULL, \'v9\', rollout, gate, wave, digest, \'{"kind":"person","name":"eve",'
    '"uid":1}\', yes, reason, at, teams, shown, nodes, more, until, NULL, NULL, NULL FROM vote;'
)


def test_forged_votes_and_gate_named(forge: Callable[[str], AuditReport]) -> None:
    report = forge(
        f"{VOTE} INSERT INTO opened (rollout, gate, wave, at) VALUES ('r1', 'continue', 'canary', 1);"
    )
    assert [
        (each.mismatch.subject, each.mismatch.kind, each.mismatch.scope) for each in report.mismatches
    ] == [
        ("vote/v9", MismatchKind.EXTRA, "rollout/r1"),
        ("opened/r1/continue/canary", MismatchKind.EXTRA, "rollout/r1"),
    ]
    assert report.chain.ok
    assert not report.ok


def test_entry_outside_the_chain_vouches_for_nothing(forge: Callable[[str], AuditReport]) -> None:
    insert = (
        "INSERT INTO audit (seq, entry, hash) SELECT seq + 1, replace(entry, 'v1', 'v9'), hash"
        " FROM audit ORDER BY seq DESC LIMIT 1;"
    )
    report = forge(VOTE + insert)
    assert not report.chain.ok
    assert [each.mismatch.subject for each in report.mismatches] == ["vote/v9"]


def test_altered_entry_makes_only_its_own_row_doubtful(forge: Callable[[str], AuditReport]) -> None:
    report = forge(
        "UPDATE audit SET entry = replace(entry, 'looks good', 'looks bad') WHERE event = 'VoteCast'"
    )
    assert not report.chain.ok
    assert {each.table for each in report.mismatches} == {"vote", "spent_token"}


def test_entries_of_older_versions_leave_unrecorded_columns_open(written: Path, tmp_path: Path) -> None:
    """Up to 0.2 an entry had neither a plan's hash nor a target's position."""
    copy = tmp_path / database.FILE_NAME
    with closing(sqlite3.connect(written)) as source, closing(sqlite3.connect(copy)) as edited:
        source.backup(edited)
        _rewrite_as_before(edited)
        edited.commit()
    assert compare_with_audit(SqliteBackend(copy)).mismatches == ()
    with closing(sqlite3.connect(copy)) as edited:
        edited.execute("UPDATE target SET position = 77, wave = 'x' WHERE node = 'n2'")
        edited.commit()
    (mismatch,) = compare_with_audit(SqliteBackend(copy)).mismatches
    assert mismatch.mismatch.columns == ("wave",)


def _rewrite_as_before(connection: sqlite3.Connection) -> None:
    head = GENESIS_HASH
    for seq, text in connection.execute("SELECT seq, entry FROM audit ORDER BY seq").fetchall():
        entry = json.loads(text)
        fields = entry["fields"]
        if entry["event"] == "RolloutOpened":
            fields.pop("content")
        if entry["event"] == "TargetsJoined":
            fields.pop("part")
        for each in fields.get("targets", ()):
            each.pop("position")
            each.pop("joined", None)
            each.pop("since", None)
        seq_last = canonical_json({k: v for k, v in entry.items() if k != "seq"})[:-1] + f',"seq":{seq}}}'
        head = hash_entry(head, seq_last)
        connection.execute("UPDATE audit SET entry = ?, hash = ? WHERE seq = ?", (seq_last, head, seq))


def is_without_rowid(table: str) -> bool:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        database.create_tables(connection)
        (sql,) = connection.execute("SELECT sql FROM sqlite_schema WHERE name = ?", (table,)).fetchone()
    return "WITHOUT ROWID" in sql
