"""What check mode reports of a node: whether the change would still change something there."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Compliance(StrEnum):
    """Whether a node needs the change; `unknown` when check mode cannot say, and never `compliant` then."""

    COMPLIANT = "compliant"
    WOULD_CHANGE = "would-change"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class TaskChange:
    """A task that would change the node; `diff` is the changed lines, if the task reports them."""

    task: str
    diff: str = ""


@dataclass(frozen=True, slots=True)
class ComplianceReport:
    """The result of check mode on one node; `problem` is what it cannot say, and why."""

    node: str
    at: float
    changes: tuple[TaskChange, ...] = ()
    problem: str = ""

    @property
    def compliance(self) -> Compliance:
        if self.changes:
            return Compliance.WOULD_CHANGE
        return Compliance.UNKNOWN if self.problem else Compliance.COMPLIANT
