"""The next step of one node, from what was recorded of it.

Level-based: `next_action` looks at the phase and at the step records and says what comes next, never what
came before.  A daemon that was killed anywhere asks the same question of the same records and gets the same
answer, so a restart needs no code of its own.  It knows no adapter: a step is a name, a kind and parameters.

The order within the phases:

- isolating: every isolator, in the plan's order, after a look at traffic (approach.py);
- maintaining: no older run is left, isolation stands: the playbook of each stage;
- verifying: infra checks, the team's, put back (isolators undone in reverse), in-service checks, probation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from machines import guard
from machines.actions import Action, Clear, Idle, Isolate, Move, Run, Settle, Undo, Verify, Wait, pause_after
from machines.approach import UNKNOWN_RETRY_S, UNKNOWN_TRIES, Approach
from machines.checks import alive, checks_of
from machines.events import StepAction, StepRecord, StepState
from machines.plan import OnUnknown, Plan, Stage, StepSpec
from machines.records import in_service_since, standing, stood_before
from machines.rollout import Order, Target
from machines.states import BUSY, Outcome, Phase, Trigger
from machines.stopping import stopping

BUSY_RETRY_S = 30.0
"""How long to wait before an isolator that found the node busy is asked again."""

TURNED = "it was being put back when the daemon ended, for a reason that it no longer knows"
"""Why a node is put back that an earlier life of the daemon had begun to put back."""

PUT_BACK_BACKOFF_S = 60.0
"""The first wait of a node that was put back; doubled with each put-back."""

PUT_BACK_BACKOFF_MOST_S = 3600.0
"""The longest wait of a node that was put back: an hour still meets most windows."""


def next_action(
    plan: Plan,
    target: Target,
    records: Sequence[StepRecord],
    now: float,
    *,
    elapsed_s: float,
    unclean: bool,
    withdraw: str = "",
) -> Action:
    """Return what comes next for one node.

    `records` are its step records in this rollout, oldest first; `elapsed_s` how
    long it has been in its phase while a daemon was there to see; `unclean` that
    an older run may have processes there; `withdraw` why it should be put back.
    """
    kept, approach = tuple(records), Approach.of(plan, target, records, now)
    asked = _Asked(plan, target, kept, now, elapsed_s, unclean, withdraw, approach)
    if target.order is Order.STOP:
        return stopping(target, asked.records)
    if target.order is Order.RETURN and target.phase not in BUSY:
        return asked.returning()
    match target.phase:
        case Phase.ISOLATING:
            return asked.isolating()
        case Phase.MAINTAINING:
            return asked.maintaining()
        case Phase.VERIFYING:
            return asked.verifying()
        case Phase.PENDING | Phase.DONE | Phase.FAILED:
            return Idle()


def backoff_s(put_backs: int) -> float:
    """Return how long a node waits that has been put back so often."""
    return float(min(PUT_BACK_BACKOFF_S * 2 ** min(put_backs, 10), PUT_BACK_BACKOFF_MOST_S))


@dataclass(frozen=True, slots=True)
class _Asked:
    plan: Plan
    target: Target
    records: tuple[StepRecord, ...]
    now: float
    elapsed_s: float
    unclean: bool
    withdraw: str
    approach: Approach

    # isolating

    def isolating(self) -> Action:
        late = self.elapsed_s >= self.plan.isolate_timeout_s
        turned = any(r.action is StepAction.UNDO and r.attempt == self.target.attempt for r in self.records)
        busy = self.approach.found()
        if self.withdraw or late or turned or busy:
            why = self.withdraw or busy or (self._late_text() if late else TURNED)
            if stood_before(self.plan.isolate, self.target, self.records) and not turned:
                # It did not pass when it was last worked on: putting it back takes a person's word.
                return Move(Trigger.FAILED, step="isolate", text=why)
            return self._putting_back(why)
        action = self._isolating() or Move(Trigger.ISOLATED)
        if not isinstance(action, Wait):
            return action
        # At its deadline the node is put back: its slot is another's.
        left_s = max(0.0, self.plan.isolate_timeout_s - self.elapsed_s)
        return replace(action, until=min(action.until, self.now + left_s))

    def _isolating(self) -> Action | None:
        """Return what is left to do until the node is isolated, None when it is."""
        for spec in self.approach.gently():
            action = self._isolate(spec, gently=True)
            if action is not None:
                return replace(action, gentle=True) if isinstance(action, Isolate) else action
        for spec in self.plan.isolate:
            action = self._isolate(spec)
            if action is not None:
                return (self.approach.looking(spec) if isinstance(action, Isolate) else None) or action
        return None if self.plan.isolate else self.approach.looking(None)

    def _late_text(self) -> str:
        busy = [
            r.text for r in self.records if r.attempt == self.target.attempt and r.state is StepState.BUSY
        ]
        why = f": {busy[-1]}" if busy else ""
        return f"not isolated within {self.plan.isolate_timeout_s:.0f} s{why}"

    def _isolate(self, spec: StepSpec, *, gently: bool = False) -> Action | None:
        """Return what one isolator still needs in this attempt, None when it stands, gently or fully."""
        latest = self._latest(spec.name, StepAction.DO, StepAction.LOOK)
        if latest is None:
            return self._isolate_now(spec, 1)
        again = latest.number + 1
        match latest.state:
            case StepState.OK:
                fully = gently or not self.approach.is_gentle(latest)
                return None if fully else self._isolate_now(spec, again)
            case StepState.INTENDED:
                return self._isolate_now(spec, latest.number)
            case StepState.BUSY:
                return pause_after(latest, BUSY_RETRY_S, self.now) or self._isolate_now(spec, again)
            case StepState.UNKNOWN if latest.number < UNKNOWN_TRIES:
                return pause_after(latest, UNKNOWN_RETRY_S, self.now) or self._isolate_now(spec, again)
            case StepState.UNKNOWN | StepState.FAILED:
                return Move(Trigger.FAILED, step=spec.name, text=latest.text)

    def _isolate_now(self, spec: StepSpec, number: int) -> Isolate:
        for stands, prior in standing([spec], self.records):
            if stands.name == spec.name:
                return Isolate(spec, number, prior_known=True, prior=prior)
        return Isolate(spec, number)

    def _putting_back(self, why: str) -> Action:
        action = self._undoing()
        if action is not None:
            return action
        return Move(Trigger.PUT_BACK, text=why, not_before=self.now + backoff_s(self.target.put_backs))

    def _undoing(self) -> Action | None:
        """Return the next thing on the way back into service, None when there is nothing left."""
        left = standing(self.plan.isolate, self.records)
        if not left:
            return None
        if self.unclean:
            return self._clear()
        spec, prior = left[-1]
        done = self._latest(spec.name, StepAction.DO)
        latest = self._latest(spec.name, StepAction.UNDO)
        began = 1 if done is None else done.number
        last = len(left) == 1
        if latest is None or latest.number < began:
            return Undo(spec, began, prior, last)
        match latest.state:
            case StepState.INTENDED:
                return Undo(spec, latest.number, prior, last)
            case StepState.UNKNOWN | StepState.BUSY if latest.number < began + UNKNOWN_TRIES:
                again = Undo(spec, latest.number + 1, prior, last)
                return pause_after(latest, UNKNOWN_RETRY_S, self.now) or again
            case _ if self._ordered_after(latest):
                return Undo(spec, latest.number + 1, prior, last)
            case _:
                return self._stuck(spec.name, latest.text)

    def _ordered_after(self, record: StepRecord) -> bool:
        """Whether a person asked for the node's return after this was tried, as far as the clock can tell."""
        # An order from later than now is from before the clock was set back: what is no later came since.
        tried_before = record.at < self.target.ordered_at <= self.now or self.now < record.at
        return self.target.order is not None and tried_before

    def _stuck(self, step: str, text: str) -> Action:
        if self.target.order is not None:
            return Settle(done=False, text=f"{step} could not be undone: {text}")
        return Move(Trigger.FAILED, step=step, text=f"could not be put back: {text}")

    def _clear(self) -> Action:
        latest = self._latest("clear", StepAction.CLEAR)
        if latest is None:
            return Clear(1)
        if latest.state is StepState.INTENDED:
            return Clear(latest.number)
        if latest.state is StepState.OK or self._ordered_after(latest):
            return Clear(latest.number + 1)
        return self._stuck("clear", latest.text)

    # maintaining

    def maintaining(self) -> Action:
        for stage in self._stages():
            action = self._run(stage)
            if isinstance(action, Run):
                return self._losing(action) or action
            if action is not None:
                return action
        return Move(Trigger.MAINTAINED)

    def _losing(self, run: Run) -> Action | None:
        """Return what must come before a run, or in its place, where the isolation was not found standing."""
        begun = self._latest(_run_step(run.stage), StepAction.RUN) if run.begun else None
        for spec in self.plan.isolate:
            again = self._isolate(spec)
            mine = [r for r in self.records if r.step == spec.name and r.attempt == self.target.attempt]
            if again is not None and mine:
                limits = (self.elapsed_s, self.plan.isolate_timeout_s)
                return guard.losing(self.target, again, mine, begun, self.now, *limits)
        return None

    def _stages(self) -> tuple[Stage, ...]:
        if not self.target.rolling_back:
            return self.plan.stages
        return () if self.plan.rollback is None else (self.plan.rollback,)

    def _run(self, stage: Stage) -> Action | None:
        latest = self._latest(_run_step(stage), StepAction.RUN)
        if latest is None:
            return self._begin(stage, 1)
        match latest.state:
            case StepState.OK:
                return None
            case StepState.INTENDED:
                return Run(stage, latest.number, begun=True)
            case StepState.FAILED | StepState.BUSY:
                return Move(Trigger.FAILED, step=_run_step(stage), text=latest.text)
            case StepState.UNKNOWN:
                return self._unknown(stage, latest)

    def _begin(self, stage: Stage, number: int) -> Action:
        if self.unclean:
            return self._clear()
        return Run(stage, number, begun=False)

    def _unknown(self, stage: Stage, latest: StepRecord) -> Action | None:
        """Judge a run of which nobody can say how it ended, as its stage asks."""
        if stage.on_unknown is OnUnknown.PAUSE:
            return Move(Trigger.FAILED, step=_run_step(stage), text=latest.text)
        if self.unclean:
            return self._clear()
        last = stage is self._stages()[-1]
        if stage.on_unknown is OnUnknown.VERIFY and last:
            verdict = self._probe(latest.number)
            if verdict is True:
                return None
            if verdict is not False:
                return verdict
        if latest.number > 1:
            return Move(Trigger.FAILED, step=_run_step(stage), text=f"{latest.text}; and so did its rerun")
        return Run(stage, latest.number + 1, begun=False)

    def _probe(self, run: int) -> Action | bool:
        """Let the checks decide whether an unknown run did its work; a bool is their verdict."""
        for spec in self._checks():
            step = f"probe.{run}.{spec.name}"
            record = self._latest(step, StepAction.CHECK)
            if record is None:
                return Verify(spec, step, 1)
            if record.state is not StepState.OK:
                return False
        return True

    # verifying

    def verifying(self) -> Action:
        red = self._red()
        if red is not None:
            return self._reisolating(red)
        for spec in self._checks():
            action = self._check(spec, spec.name)
            if action is not None:
                return action
        action = self._undoing()
        if action is not None:
            return action
        for spec in self._in_service():
            action = self._check(spec, spec.name)
            if action is not None:
                return action
        action = self._probation()
        if action is not None:
            return action
        outcome = Outcome.ROLLED_BACK if self.target.rolling_back else Outcome.CHANGED
        return Move(Trigger.VERIFIED, outcome)

    def _checks(self) -> tuple[StepSpec, ...]:
        """The checks while the node is isolated: the infra team's, then the node's team's."""
        return tuple(spec for spec in self._all_checks() if not spec.in_service)

    def _in_service(self) -> tuple[StepSpec, ...]:
        return tuple(spec for spec in self._all_checks() if spec.in_service)

    def _all_checks(self) -> tuple[StepSpec, ...]:
        return checks_of(self.plan, self.target)

    def _check(self, spec: StepSpec, step: str) -> Action | None:
        record = self._latest(step, StepAction.CHECK)
        if record is None:
            return Verify(spec, step, 1)
        match record.state:
            case StepState.OK:
                return None
            case StepState.UNKNOWN if record.number < UNKNOWN_TRIES:
                return Verify(spec, step, record.number + 1)
            case StepState.INTENDED:
                return Verify(spec, step, record.number)
            case StepState.FAILED | StepState.BUSY | StepState.UNKNOWN:
                return Move(Trigger.FAILED, step=step, text=record.text)

    def _probation(self) -> Action | None:
        """Wait out the probation, then judge once more what is in service."""
        if self.plan.probation_s <= 0:
            return None
        until = in_service_since(self.target, self.records) + self.plan.probation_s
        if self.now < until:
            return Wait(until, "probation")
        for spec in self._in_service() or alive(self._all_checks()):
            action = self._check(spec, f"probation.{spec.name}")
            if action is not None:
                return action
        return None

    def _red(self) -> StepRecord | None:
        """Return the check that failed after the node was put back, if one did."""
        late = {spec.name for spec in self._in_service()}
        for record in self.records:
            if record.attempt != self.target.attempt or record.action is not StepAction.CHECK:
                continue
            if record.step not in late and not record.step.startswith("probation."):
                continue
            spent = record.state is StepState.UNKNOWN and record.number >= UNKNOWN_TRIES
            if record.state is StepState.FAILED or spent:
                return record
        return None

    def _reisolating(self, red: StepRecord) -> Action:
        """Isolate a node again whose check turned red in service, then fail it."""
        later = self.records[self.records.index(red) :]
        text = red.text
        for spec in self.plan.isolate:
            asked = [r for r in later if r.step == spec.name and r.action in (StepAction.DO, StepAction.LOOK)]
            if not asked:
                latest = self._latest(spec.name, StepAction.DO)
                number = 1 if latest is None else latest.number + 1
                return replace(self._isolate_now(spec, number), gentle=True)
            if asked[-1].state is StepState.INTENDED:
                return replace(self._isolate_now(spec, asked[-1].number), gentle=True)
            if asked[-1].state is not StepState.OK:
                text += f"; and it could not be isolated again: {asked[-1].text}"
        return Move(Trigger.FAILED, step=red.step, text=text)

    # returning, by a person's order

    def returning(self) -> Action:
        """Put a node back because a person said so: undo, then see that it is alive."""
        action = self._undoing()
        if action is not None:
            return action
        for spec in alive(self._all_checks()):
            step = f"return.{spec.name}"
            record = self._latest(step, StepAction.CHECK)
            if record is None or self._ordered_after(record):
                return Verify(spec, step, 1 if record is None else record.number + 1)
            if record.state is not StepState.OK:
                return Settle(done=False, text=f"{spec.name}: {record.text}")
        return Settle(done=True, text="returned")

    # what was recorded

    def _latest(self, step: str, *actions: StepAction) -> StepRecord | None:
        """Return the last record of a step in this attempt."""
        for record in reversed(self.records):
            if record.step == step and record.action in actions and record.attempt == self.target.attempt:
                return record
        return None


def _run_step(stage: Stage) -> str:
    return f"run.{stage.name}"
