"""The verification of a node whose outage several attempts share: turns, witnesses, one return.

It knows the other attempts as values; what a step of this attempt needs it asks of the walker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from machines.model.actions import Action, Transition, Wait
from machines.model.causes import said
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.model.train import OutageProgress
from machines.states import Trigger
from machines.workflow.outage import OUTAGE_STEP
from machines.workflow.situation import Situation
from machines.workflow.steps import (
    CLEAN_UP,
    Purpose,
    Step,
    StepPrefix,
    names_after,
    needs_clean_node,
    steps_after,
)


class Walker(Protocol):
    """What walks the steps of the attempt."""

    @property
    def attempt_records(self) -> Sequence[StepRecord]: ...
    def walk(self, *purposes: Purpose) -> Action | None: ...
    def next_of(self, step: Step) -> Action | None: ...
    def try_of(self, step: Step, latest: StepRecord | None) -> int | Wait | StepState: ...
    def start(self, step: Step, number: int) -> Action: ...
    def latest(self, step: Step) -> StepRecord | None: ...
    def excuses(self, step: Step, latest: StepRecord) -> bool: ...
    def active(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class SharedVerification:
    situation: Situation
    walker: Walker

    def walk(self) -> Action | None:
        """Return what a node's verification needs while other attempts share its outage."""
        outage = self.situation.outage
        # Time alone ends only the wait for a joiner; all else another attempt ends.
        wait = Wait(outage.joiner_until if outage.joiner else math.inf, OUTAGE_STEP)
        action = self.walker.walk(Purpose.VERIFY) or self._judge_others(wait)
        if action is not None:
            return action
        if self.walker.active():
            return self._return_blocker(wait) or self.walker.walk(Purpose.RETURN)
        # Another change keeps the node down, so nothing can be checked in service; this one has passed.
        if outage.is_kept_down:
            return None
        # The node is in service when the last holder of its isolation has returned it.
        if any(peer.target.isolated for peer in outage.peers):
            return wait
        # In turns: a check may be a run, and no two may be on one node.
        if any(not peer.progress.has_served for peer in outage.earlier):
            return wait
        action = self.walker.walk(Purpose.VERIFY_IN_SERVICE, Purpose.WATCH)
        return action or (wait if outage.earlier else self.walker.walk(Purpose.PROBATION))

    def _return_blocker(self, wait: Wait) -> Action | None:
        """Return why this attempt keeps its isolation, None when it may undo it."""
        outage = self.situation.outage
        if outage.is_kept_down:
            # What only this attempt isolates would be in service while a failed change is there.
            is_covered = all(name in outage.held for name in self.walker.active())
            return None if is_covered else wait
        if outage.is_at_work():
            return wait
        accusation = outage.accusation(self.situation.target)
        if accusation:
            return Transition(Trigger.FAILED, step=OUTAGE_STEP, causes=said(accusation))
        is_last = not any(peer.is_later and peer.target.isolated for peer in outage.peers)
        # A return that has begun ends: the node may be in service already, so no rollout joins.
        is_awaited = bool(outage.joiner) and not self._is_returning()
        return None if is_last and accusation is not None and not is_awaited else wait

    def _is_returning(self) -> bool:
        """Return whether this attempt has begun to undo its isolation."""
        moves = (StepAction.APPLY, StepAction.REVERT)
        latest = next((r for r in reversed(self.walker.attempt_records) if r.action in moves), None)
        return latest is not None and latest.action is StepAction.REVERT

    def _judge_others(self, wait: Wait) -> Action | None:
        """Return the next check after the change of another attempt, None when all have passed."""
        outage = self.situation.outage
        if outage.is_at_work():
            return wait
        judged = [peer for peer in outage.peers if peer.must_be_judged]
        for peer in judged:
            # In turns, as in service.
            before = (each for each in outage.earlier if each is not peer)
            if any(peer.key not in each.progress.judged for each in before):
                return wait
            verdict = self._judge_after(peer.key)
            if verdict != "":
                return wait if isinstance(verdict, str) else verdict
        for key in sorted(self._failed_after() - {peer.key for peer in judged}):
            if outage.is_kept_down:
                return wait
            # The change that broke it is settled; what is left of it is this attempt's own failure.
            verdict = self._judge_after(f"{key}.settled")
            if isinstance(verdict, str) and verdict:
                return Transition(Trigger.FAILED, step=OUTAGE_STEP, causes=said(verdict))
            if not isinstance(verdict, str):
                return verdict
        return None

    def _judge_after(self, key: str) -> Action | str:
        """Return the next check after a change, what the first one that failed says, or "" for passed."""
        for step in steps_after(self.situation.plan, key):
            latest = self.walker.latest(step)
            if self.situation.has_unfinished_run and needs_clean_node(step, latest):
                action = self.walker.next_of(CLEAN_UP)
                assert action is not None
                return action
            match self.walker.try_of(step, latest):
                case int() as number:
                    return self.walker.start(step, number)
                case Wait() as wait:
                    return wait
                case state if state is not StepState.OK and latest and not self.walker.excuses(step, latest):
                    return f"{self.situation.target.rollout}: {latest.text or state}"
        return ""

    def _failed_after(self) -> set[str]:
        """Return the changes of others after which a check of this attempt failed."""
        keys = set()
        for record in self.walker.attempt_records:
            if record.state in (StepState.FAILED, StepState.UNKNOWN):
                names = names_after(StepPrefix.AFTER, record.step)
                checks = (f".{spec.name}" for spec in self.situation.plan.verify)
                keys |= {names.removesuffix(check) for check in checks if names.endswith(check)}
        return {key for key in keys if not key.endswith(".settled") and self._judge_after(key) != ""}

    def progress(self, action: Action | None) -> OutageProgress:
        """Return how far the attempt is, for the others; `action` is what it does next."""
        has_passed = self.walker.walk(Purpose.VERIFY) is None
        is_returned = has_passed and not self.walker.active()
        peers = (peer for peer in self.situation.outage.peers if peer.must_be_judged)
        verdicts = {peer.key: self._judge_after(peer.key) for peer in peers}
        return OutageProgress(
            self.situation.target.attempt,
            has_passed=has_passed,
            has_served=is_returned and self.walker.walk(Purpose.VERIFY_IN_SERVICE) is None,
            waits=isinstance(action, Wait) and action.step == OUTAGE_STEP,
            judged={key: verdict for key, verdict in verdicts.items() if isinstance(verdict, str)},
        )
