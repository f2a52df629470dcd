"""The audit, and the stream of its entries as they are written."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from rolloutd.control.wire.rollouts import InFlight


class AuditEntry(TypedDict):
    """One audit entry; `entry` is what was hashed, parsed: its instants are epoch seconds, `at` is not."""

    seq: int
    at: str
    hash: str
    entry: dict[str, Any]


class Audit(TypedDict):
    """A page of the audit; `next` is the `after` of the next page, null at the end."""

    entries: list[AuditEntry]
    next: int | None


class Verdict(TypedDict):
    """Whether the audit's chain is whole; `first_bad` is the first entry that is not."""

    ok: bool
    entries: int
    head: str
    first_bad: int | None
    message: str


class Head(TypedDict):
    """The latest audit entry; its hash, kept elsewhere, shows later whether the tail was cut."""

    seq: int
    hash: str
    at: str | None


class InFlightOf(InFlight):
    """A node in flight, and whose."""

    rollout: str


class EventLine(TypedDict):
    """One line of the event stream: an entry, or what runs now, or a sign of life.

    `heartbeat` is the sequence number up to which everything was told.
    """

    seq: int | None
    entry: NotRequired[dict[str, Any]]
    progress: NotRequired[list[InFlightOf]]
    heartbeat: NotRequired[int]
