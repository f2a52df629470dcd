"""Models of the API's responses about the audit."""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict


class AuditEntry(TypedDict):
    """One audit entry; `entry` is the hashed text, parsed: its instants are epoch seconds."""

    seq: int
    at: str
    hash: str
    entry: dict[str, Any]


class AuditExport(TypedDict):
    """Where entries are that the database no longer has: `through` is the last one, `head` its hash."""

    through: int
    head: str
    directory: str


class Audit(TypedDict):
    """A page of the audit; `next` is the `after` or the `before` of the next page, null at the end."""

    entries: list[AuditEntry]
    next: int | None
    exported: AuditExport | None


class AuditMismatch(TypedDict):
    """A row of the database that does not follow from the audit.

    `kind`: extra, missing or altered; `columns`: those that differ; `scope`: what does not start until an
    admin has settled it; `restorable`: the audit has all that the row needs.
    """

    subject: str
    kind: str
    scope: str
    columns: list[str]
    restorable: bool
    text: str


class AuditVerification(TypedDict):
    """Whether the audit's hash chain is intact and the database follows from it.

    `first_bad` is the first entry that breaks the chain; `unreadable` are entries of an unknown form;
    `compared` is false for the file of an older version, of which only the chain was verified.  `entries`
    counts those that were exported too.
    """

    ok: bool
    entries: int
    head: str
    first_bad: int | None
    message: str
    mismatches: list[AuditMismatch]
    unreadable: list[int]
    compared: bool
    exported: AuditExport | None


class AuditHead(TypedDict):
    """The latest audit entry; a copy of its hash shows later whether the tail was cut."""

    seq: int
    hash: str
    at: str | None
    exported: AuditExport | None
