"""The configurations that runs gave to a node: the one that passed last, the one before, the one that failed.

A configuration is known here by the hash of its document only; the shell keeps the document.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from machines.model.events import PhaseMoved
from machines.model.rollout import Target
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
        if had_passed and self._is_current(failed.rollout):
            return NodeConfiguration(self.previous, None, failed)
        return replace(self, invalid=failed)

    def _rolled_back(self, target: Target, at: float) -> NodeConfiguration:
        """Return the records after a rollback: what the rollout replaced is current again.

        What was before that is not known, and what was taken off must not come back with the next rollback.
        """
        if not self._is_current(target.rollout):
            return self
        restored = None if self.previous is None else replace(self.previous, at=at)
        return replace(self, current=restored, previous=None)

    def _is_current(self, rollout: str) -> bool:
        return self.current is not None and self.current.rollout == rollout
