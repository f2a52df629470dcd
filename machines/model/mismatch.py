"""A stored row that the audit does not account for, and what it makes doubtful."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MismatchKind(StrEnum):
    NOT_COMPARED = "not-compared"
    """The audit was not compared with the tables yet since the start."""
    EXTRA = "extra"
    """The table has a row that no entry made."""
    MISSING = "missing"
    """The table lacks a row that an entry made."""
    ALTERED = "altered"
    """The row differs from what the entries made of it."""


@dataclass(frozen=True, slots=True)
class AuditMismatch:
    """One such row; `subject` names it, `columns` those that differ.

    `scope` is what must not start: `all`, `rollout/ID`, `node/NAME` or `team/NAME`.  `node` is the node of
    that rollout whose own records are doubtful: its driver waits too.
    """

    subject: str
    kind: MismatchKind
    scope: str
    columns: tuple[str, ...] = ()
    node: str | None = None


NOT_COMPARED = AuditMismatch("audit", MismatchKind.NOT_COMPARED, "all")
"""In effect from a daemon's start until its first comparison."""
