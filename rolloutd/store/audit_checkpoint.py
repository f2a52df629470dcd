"""The checkpoint: a signed record of the audit's head and of the digests of the tables.

It proves that the newest entry and the digested rows are those of the last commit of a daemon with this
machine's key.  It does not prove that older entries are unaltered, nor rows of closed rollouts, nor anything
against a user who can read the key: see docs/operations.md.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rolloutd.audit.audit_chain import GENESIS_HASH, canonical_json, hash_entry
from rolloutd.ports import AuditCheckpointReport, AuditEntry
from rolloutd.store.backend import Backend, Connection
from rolloutd.store.codec import to_json
from rolloutd.store.queries import IS_LIVE
from rolloutd.store.row_digests import WHOLE_TABLES, RowDigests, format_sum, parse

GENERATION_BYTES = 4
"""Enough that no two generations of one database are equal; it is no secret."""


@dataclass(frozen=True, slots=True)
class AuditCheckpointRecord:
    """What is signed.

    `sums`: those of the tables that have one.  `rollouts`: which were live when the list was last made, or
    have changed since; their rows are compared.  `verified_at`: when the whole audit was last verified.
    """

    generation: str
    seq: int
    head: str
    sums: dict[str, str]
    rollouts: tuple[str, ...]
    verified_at: float


class AuditCheckpoint:
    """The checkpoint of one database, as one connection reads and writes it."""

    def __init__(self, connection: Connection, key: bytes) -> None:
        self._connection = connection
        self._key = key
        self.digests = RowDigests(connection, key)
        self._record: AuditCheckpointRecord | None = None
        self._written: tuple[tuple[str, str], AuditCheckpointRecord] | None = None
        """The row that was written last, and its record; the transaction may have been rolled back."""

    # -- in each transaction of the writer

    def begin(self, head: AuditEntry) -> None:
        """Read the record; one that is not of this head, or not of this key, is not carried on."""
        self.digests.begin()
        record, problem = self.read()
        self._record = None if problem or record is None or record.head != head.hash else record

    def carry_on(self, head: AuditEntry) -> None:
        """Write the record of the rows and the head that this transaction leaves."""
        if self._record is None:
            return
        record = self._record
        changes, rollouts = self.digests.settle(record.generation)
        sums = dict(record.sums)
        for table, change in changes.items():
            sums[table] = format_sum(record.generation, (parse(record.generation, sums[table]) or 0) + change)
        listed = (*record.rollouts, *sorted(rollouts - set(record.rollouts)))
        self._write(replace(record, seq=head.seq, head=head.hash, sums=sums, rollouts=listed))

    def establish(self, head: AuditEntry, verified_at: float) -> None:
        """Begin a generation, after the whole audit was verified and accounted for all rows."""
        generation = secrets.token_hex(GENERATION_BYTES)
        live = self._live_rollouts()
        self.digests.record_live(generation, live)
        sums = {name: format_sum(generation, self.digests.sum_of_table(name)) for name in WHOLE_TABLES}
        self.digests.forget()
        self._record = AuditCheckpointRecord(generation, head.seq, head.hash, sums, live, verified_at)
        self._write(self._record)

    def refresh(self, verified_at: float | None) -> None:
        """List the live rollouts again, and note when the whole audit was verified, if there is a record."""
        if self._record is not None:
            noted = self._record.verified_at if verified_at is None else verified_at
            live = self._live_rollouts()
            self.digests.record_live(self._record.generation, live, only_unknown=True)
            self._record = replace(self._record, rollouts=live, verified_at=noted)

    def abandon(self) -> None:
        """Carry nothing on: the transaction that changed the record was rolled back."""
        self._record = None

    def drop(self) -> None:
        """Remove the record: until a row in doubt is settled, each start verifies the whole audit."""
        self._connection.execute("DELETE FROM audit_checkpoint")
        self._record = None

    # -- at a start

    def read(self) -> tuple[AuditCheckpointRecord | None, str]:
        """Return the record, and what is wrong with it."""
        row = self._connection.execute("SELECT content, signature FROM audit_checkpoint").fetchone()
        if row is None:
            return None, "the database has none"
        # Each commit of the writer reads what the one before wrote.
        if self._written is not None and row == self._written[0]:
            return self._written[1], ""
        content, signature = row
        if not hmac.compare_digest(self._sign(content), signature):
            return None, "its signature is of another key"
        values: dict[str, Any] = json.loads(content)
        return AuditCheckpointRecord(**{**values, "rollouts": tuple(values["rollouts"])}), ""

    def find_difference(self) -> tuple[AuditCheckpointRecord | None, str]:
        """Return the record, and what differs from it; the caller has begun a transaction."""
        record, problem = self.read()
        if record is None:
            return None, problem
        problem = self._head_difference(record) or self._rows_difference(record)
        return record, problem

    def _head_difference(self, record: AuditCheckpointRecord) -> str:
        sql = "SELECT seq, entry, hash FROM audit ORDER BY seq DESC LIMIT 2"
        newest = self._connection.execute(sql).fetchall()
        seq, text, entry_hash = newest[0] if newest else (0, "", GENESIS_HASH)
        if (seq, entry_hash) != (record.seq, record.head):
            return f"the newest entry is {seq}, but {record.seq} was signed, or it has another hash"
        previous = newest[1][2] if len(newest) > 1 else GENESIS_HASH
        if newest and hash_entry(previous, text) != entry_hash:
            return f"entry {seq} was altered"
        return ""

    def _rows_difference(self, record: AuditCheckpointRecord) -> str:
        for table in WHOLE_TABLES:
            stored = parse(record.generation, record.sums.get(table, ""))
            if stored != self.digests.sum_of_table(table):
                return f"rows of the table {table} differ from those that were signed"
        # Those that are live by these rows, and those that were live: a row may hide that one is.
        rollouts = dict.fromkeys((*record.rollouts, *self._live_rollouts()))
        problem = self.digests.find_difference(record.generation, rollouts)
        return f"{problem} differ from those that were signed" if problem else ""

    def _live_rollouts(self) -> tuple[str, ...]:
        rows = self._connection.execute(f"SELECT id FROM rollout WHERE {IS_LIVE} ORDER BY number")  # noqa: S608
        return tuple(rollout for (rollout,) in rows.fetchall())

    def _write(self, record: AuditCheckpointRecord) -> None:
        content = canonical_json(to_json(record))
        signature = self._sign(content)
        sql = (
            "INSERT INTO audit_checkpoint (id, content, signature) VALUES (1, ?1, ?2)"
            " ON CONFLICT (id) DO UPDATE SET content = ?1, signature = ?2"
        )
        self._connection.execute(sql, (content, signature))
        self._written = (content, signature), record

    def _sign(self, content: str) -> str:
        return hmac.new(self._key, content.encode(), hashlib.sha256).hexdigest()


def read_audit_checkpoint(backend: Backend) -> AuditCheckpointReport:
    """Compare a database with its checkpoint while a daemon may write to it; raises StoreFailed."""
    if not (key := backend.load_signing_key(may_make=False)):
        return AuditCheckpointReport("the key that signs it is not there")
    return backend.read_now(partial(verify_audit_checkpoint, key=key))


def verify_audit_checkpoint(connection: Connection, key: bytes) -> AuditCheckpointReport:
    """Compare the newest entry and the digested rows with the signed record, in one read transaction."""
    connection.execute("BEGIN")
    try:
        record, problem = AuditCheckpoint(connection, key).find_difference()
    finally:
        connection.execute("ROLLBACK")
    if record is None:
        return AuditCheckpointReport(problem)
    return AuditCheckpointReport(problem, record.seq, record.verified_at)
