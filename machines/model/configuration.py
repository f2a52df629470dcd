"""The configuration of a node: contents of runs, verdicts after failures, reports of check mode.

A configuration is known here by the hash of its document only; the shell keeps the document.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from machines.model.events import PhaseMoved
from machines.model.rollout import Target, Verdict
from machines.states import Outcome, Trigger


@dataclass(frozen=True, slots=True)
class ConfigurationRecord:
    """A configuration that a rollout gave to a node; `step` and `text` are the evidence of a failure."""

    content: str
    rollout: str
    at: float
    step: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class NodeConfiguration:
    """A node's records: `current` passed last, `previous` before it, `invalid` failed last."""

    current: ConfigurationRecord | None = None
    previous: ConfigurationRecord | None = None
    invalid: ConfigurationRecord | None = None

    def after(self, target: Target, event: PhaseMoved) -> NodeConfiguration:
        """Return the records after a transition of this target, which is as it was before."""
        if event.outcome is Outcome.ROLLED_BACK:
            return self._rolled_back(target, event.at)
        # A rollback that fails says nothing against the content that it takes off.
        if not target.content or target.rolling_back:
            return self
        found = ConfigurationRecord(target.content, target.rollout, event.at)
        if event.trigger is Trigger.VERIFIED:
            return self._passed(found)
        if event.failure is not None and event.failure.blames_change:
            failed = replace(found, step=event.failure.step, text=event.failure.message)
            return self._failed(failed, had_passed=event.trigger is Trigger.SOAK_CHECK_FAILED)
        return self

    def _passed(self, passed: ConfigurationRecord) -> NodeConfiguration:
        is_same = self.current is not None and self.current.content == passed.content
        is_valid_again = self.invalid is not None and self.invalid.content == passed.content
        return NodeConfiguration(
            passed, self.previous if is_same else self.current, None if is_valid_again else self.invalid
        )

    def _failed(self, failed: ConfigurationRecord, *, had_passed: bool) -> NodeConfiguration:
        # A canary that fails in its soak had passed first, so it is taken back out of `current`.
        if had_passed and self._is_current(failed.rollout):
            return NodeConfiguration(self.previous, None, failed)
        return replace(self, invalid=failed)

    def _rolled_back(self, target: Target, at: float) -> NodeConfiguration:
        """Return the records after a rollback: what the rollout replaced is current again.

        What was before that is not known, and what was taken off must not come back with the next rollback.
        """
        is_own = self.previous is not None and self.previous.rollout == target.rollout
        kept = None if is_own else self.previous
        if not self._is_current(target.rollout):
            return replace(self, previous=kept)
        restored = None if kept is None else replace(kept, at=at)
        return replace(self, current=restored, previous=None)

    def _is_current(self, rollout: str) -> bool:
        return self.current is not None and self.current.rollout == rollout


def new_verdict(
    target: Target, moved: PhaseMoved, change: str, labels: Mapping[str, str], class_keys: Iterable[str]
) -> Verdict | None:
    """Return the verdict on the content of a target, as it was before the transition; None for no verdict."""
    failure = moved.failure
    if failure is None or not failure.blames_change or not target.content or target.rolling_back:
        return None
    return Verdict(
        f"{target.rollout}.{failure.id.replace('#', '.')}",
        change,
        target.content,
        {key: labels.get(key, "") for key in class_keys},
        target.rollout,
        target.node,
        failure.step,
        failure.message,
        failure.at,
    )


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
