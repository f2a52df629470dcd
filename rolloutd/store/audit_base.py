"""The audit's base: the last exported entry, and the tables that the entries up to it make.

The replay of the audit begins at the base, so entries up to it can be removed.  The tables are in the
database, so that a backup is whole without the segments.  They follow from the entries alone, never from the
tables in use, and a signature covers them.  They are written before the row that makes them the base.

A migration that renames or drops a column of a compared table must change the parts too: the replay refuses a
column that the tables do not have.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rolloutd.audit.audit_chain import canonical_json
from rolloutd.errors import StoreFailed
from rolloutd.ports import AuditBase
from rolloutd.store.audit_replay import AuditReplay
from rolloutd.store.backend import Connection
from rolloutd.store.schema import KEYS

ROWS_PER_PART = 500
"""Rows of one part, which one transaction writes: its JSON holds Python's lock for a few milliseconds."""

MIN_ENTRIES_AFTER = 2
"""Entries that stay after the base: the checkpoint compares the newest with the hash of the one before."""

_NEWEST = "SELECT seq, head, origin, made_at, digest, signature FROM {} ORDER BY seq DESC LIMIT 1"


@dataclass(frozen=True, slots=True)
class BaseRecord:
    """A base as it is stored; `digest` is over the parts, `signature` over all else."""

    base: AuditBase
    digest: str
    signature: str


@dataclass(frozen=True, slots=True)
class NewBase:
    """A base that is still to be written, and the compressed parts of its tables."""

    record: BaseRecord
    parts: Sequence[bytes]


def read_base(connection: Connection, schema: str = "") -> BaseRecord | None:
    """Return the base of a database, None for one whose audit begins with the first entry."""
    row = connection.execute(_NEWEST.format(f"{schema}.audit_base" if schema else "audit_base")).fetchone()
    return None if row is None else BaseRecord(AuditBase(*row[:4]), row[4], row[5])


def load_base(connection: Connection) -> AuditBase:
    """Return the last exported entry; entries up to it may still be there, and are read no more."""
    record = read_base(connection)
    return AuditBase() if record is None else record.base


def describe_forgery(record: BaseRecord, key: bytes) -> str:
    """Return why a base is not trusted, the empty string if it is; without a key it cannot be checked."""
    if not key or hmac.compare_digest(_sign(record.base, record.digest, key), record.signature):
        return ""
    return (
        f"what stands for entries up to {record.base.seq} is not signed with this machine's key:"
        " verify with --segments"
    )


def restore_tables(connection: Connection, record: BaseRecord, replay: AuditReplay) -> None:
    """Fill the empty tables `main` with those of the base in `stored`; raises StoreFailed."""
    parts = "SELECT content FROM stored.audit_base_part WHERE seq = ? ORDER BY number"
    digest = hashlib.sha256()
    for (content,) in connection.execute(parts, (record.base.seq,)):
        digest.update(hashlib.sha256(content).digest())
        try:
            _restore_part(connection, replay, json.loads(zlib.decompress(content)))
        except (zlib.error, ValueError, KeyError, TypeError) as error:
            raise _make_damaged_error(record.base, str(error)) from error
    if digest.hexdigest() != record.digest:
        raise _make_damaged_error(record.base, "its digest is another")


def make_base(connection: Connection, replay: AuditReplay, base: AuditBase, key: bytes) -> NewBase:
    parts = [_compress({"table": "", "state": replay.state()}), *_dump_tables(connection)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    signature = _sign(base, digest.hexdigest(), key)
    return NewBase(BaseRecord(base, digest.hexdigest(), signature), parts)


def write_part(connection: Connection, seq: int, number: int, content: bytes) -> None:
    connection.execute("DELETE FROM audit_base_part WHERE seq = ? AND number = ?", (seq, number))
    sql = "INSERT INTO audit_base_part (seq, number, content) VALUES (?, ?, ?)"
    connection.execute(sql, (seq, number, content))


def write_record(connection: Connection, record: BaseRecord) -> None:
    base = record.base
    (newest,) = connection.execute("SELECT max(seq) FROM audit").fetchone()
    row = connection.execute("SELECT hash FROM audit WHERE seq = ?", (base.seq,)).fetchone()
    if row is None or row[0] != base.head or base.seq > newest - MIN_ENTRIES_AFTER:
        raise StoreFailed(f"audit base: entry {base.seq} is not the one that was exported; see audit verify")
    connection.execute(
        "INSERT INTO audit_base (seq, head, origin, made_at, digest, signature) VALUES (?, ?, ?, ?, ?, ?)",
        (base.seq, base.head, base.origin, base.made_at, record.digest, record.signature),
    )


def sign_again(connection: Connection, key: bytes) -> None:
    """Sign the base of a restored copy with the key of this machine."""
    record = read_base(connection)
    if record is not None:
        signature = _sign(record.base, record.digest, key)
        connection.execute("UPDATE audit_base SET signature = ? WHERE seq = ?", (signature, record.base.seq))


def remove_exported(connection: Connection, limit: int) -> None:
    """Remove the first entries up to the base, or where none is left, parts that no base needs."""
    connection.execute(
        "DELETE FROM audit WHERE seq IN (SELECT seq FROM audit WHERE seq <="
        " (SELECT max(seq) FROM audit_base) ORDER BY seq LIMIT ?)",
        (limit,),
    )
    connection.execute("DELETE FROM audit_base WHERE seq < (SELECT max(seq) FROM audit_base)")
    # One part: each is as large as many entries.
    connection.execute(
        "DELETE FROM audit_base_part WHERE (seq, number) IN (SELECT seq, number FROM audit_base_part"
        " WHERE seq NOT IN (SELECT seq FROM audit_base) LIMIT 1)"
    )


def has_exported(connection: Connection) -> bool:
    """Return whether something is left that remove_exported() removes."""
    entry = "SELECT 1 FROM audit WHERE seq <= (SELECT max(seq) FROM audit_base) LIMIT 1"
    part = "SELECT 1 FROM audit_base_part WHERE seq NOT IN (SELECT seq FROM audit_base) LIMIT 1"
    return any(connection.execute(sql).fetchone() is not None for sql in (entry, part))


def origin_of(connection: Connection) -> str:
    """Return the hash of the very first entry, which identifies the database; empty for none."""
    record = read_base(connection, "stored")
    if record is not None:
        return record.base.origin
    row = connection.execute("SELECT hash FROM stored.audit WHERE seq = 1").fetchone()
    return row[0] if row else ""


def _dump_tables(connection: Connection) -> Iterator[bytes]:
    for table in KEYS:
        order = ", ".join(KEYS[table])
        rows = connection.execute(f"SELECT * FROM main.{table} ORDER BY {order}")  # noqa: S608  # our own schema
        columns = [name for name, *_ in rows.description]
        part: list[Any] = []
        for row in rows:
            part.append(row)
            if len(part) == ROWS_PER_PART:
                yield _compress({"table": table, "columns": columns, "rows": part})
                part = []
        if part:
            yield _compress({"table": table, "columns": columns, "rows": part})


def _restore_part(connection: Connection, replay: AuditReplay, part: Any) -> None:
    table = part["table"]
    if not table:
        replay.resume(part["state"])
        return
    if table not in KEYS:
        raise ValueError(f"no such table: {table}")
    columns = [name for name, *_ in connection.execute(f"SELECT * FROM main.{table} LIMIT 0").description]  # noqa: S608
    if unknown := set(part["columns"]) - set(columns):
        raise ValueError(f"no such columns: {', '.join(sorted(unknown))}")
    names, places = ", ".join(part["columns"]), ", ".join("?" * len(part["columns"]))
    sql = f"INSERT INTO main.{table} ({names}) VALUES ({places})"  # noqa: S608  # checked above
    connection.executemany(sql, part["rows"])


def _compress(value: Any) -> bytes:
    return zlib.compress(canonical_json(value).encode())


def _sign(base: AuditBase, digest: str, key: bytes) -> str:
    content = canonical_json(["audit-base", base.seq, base.head, base.origin, base.made_at, digest])
    return hmac.new(key, content.encode(), hashlib.sha256).hexdigest()


def _make_damaged_error(base: AuditBase, problem: str) -> StoreFailed:
    return StoreFailed(
        f"audit base: what stands for entries up to {base.seq} is damaged ({problem}); restore a backup"
    )
