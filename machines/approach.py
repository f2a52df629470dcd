"""How a node is taken out of service whose traffic is looked at: gently, look again, and only then fully.

Between the look that let it start and its isolation traffic may come.  So every
isolator that can keeps new work away first and drives nothing off; then the
probes look once more, and what they find puts the node back as it was.  An
isolator that knows no gentle way is preceded by a look.  All is read from the
records of the attempt, as everything in reconcile.py is, so that a daemon that
was killed in between goes on here.  A rollback is a person's order, and no probe
is asked about it; one that was put back starts again by its turn, as any node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from machines.actions import Action, Probe, pause_after
from machines.events import StepAction, StepRecord, StepState
from machines.plan import Plan, StepSpec
from machines.records import stood_before
from machines.rollout import Target

GENTLE_KINDS = frozenset({"kubernetes"})
"""Isolators that can keep new work away without driving running work off."""

SOON_S = 15.0
"""How old the last look may be when something is done that drives work off: the next step, on a slow day."""

AGAIN_S = 30.0
"""How long a node that may not be put back waits before its traffic is looked at again."""

UNKNOWN_RETRY_S = 5.0
"""How long to wait before asking again after a lost answer: a connection is back sooner than a person."""

UNKNOWN_TRIES = 3
"""How often a step whose answer was lost is asked again; traffic that stays unknown counts as busy then."""


@dataclass(frozen=True, slots=True)
class Approach:
    """One attempt at one node; without `probes` its traffic is not looked at, and all is as if it were idle.

    `records` are those of the attempt, oldest first.  `stays` says that the node
    must not be put back in service: it is waited for.
    """

    isolators: Sequence[StepSpec]
    probes: Sequence[StepSpec]
    records: Sequence[StepRecord]
    now: float
    stays: bool

    @classmethod
    def of(cls, plan: Plan, target: Target, records: Sequence[StepRecord], now: float) -> Approach:
        """Return the approach to a node, by all its records."""
        ordered = target.rolling_back and not target.put_backs
        probes = () if ordered else plan.traffic
        mine = [record for record in records if probes and record.attempt == target.attempt]
        stays = bool(probes) and stood_before(plan.isolate, target, records)
        return cls(plan.isolate, probes, mine, now, stays)

    def gently(self) -> Sequence[StepSpec]:
        """Return the isolators that keep new work away before the first look; none once it was made."""
        if self._idle_before(len(self.records)):
            return ()
        return [spec for spec in self.isolators if spec.kind in GENTLE_KINDS]

    def is_gentle(self, record: StepRecord) -> bool:
        """Say whether this isolating came before the look, and so drove nothing off."""
        return bool(self.probes) and not self._idle_before(self.records.index(record))

    def found(self) -> str:
        """Return the traffic for which the node is put back; "" where there is none."""
        if self.stays:
            return ""
        for probe in self.probes:
            looks = self._looks(probe)
            if looks and (looks[-1].state is StepState.BUSY or _is_spent(looks)):
                return looks[-1].text
        return ""

    def looking(self, spec: StepSpec | None) -> Action | None:
        """Return what must be seen before this isolator drives anything off, None when it may.

        Without an isolator it is the playbook that would.
        """
        if spec is not None and spec.kind in GENTLE_KINDS and self._drives_off(spec):
            return None
        for probe in self.probes:
            action = self._look(probe)
            if action is not None:
                return action
        return None

    def _look(self, probe: StepSpec) -> Action | None:
        looks = self._looks(probe)
        if not looks:
            return Probe(probe, 1)
        latest = looks[-1]
        if latest.state is StepState.OK:
            fresh = 0.0 <= self.now - latest.at < SOON_S
            return None if fresh else Probe(probe, latest.number + 1)
        lasting = latest.state is StepState.BUSY or _is_spent(looks)
        patience_s = AGAIN_S if lasting else UNKNOWN_RETRY_S
        return pause_after(latest, patience_s, self.now) or Probe(probe, latest.number + 1)

    def _drives_off(self, spec: StepSpec) -> bool:
        """Whether this isolator has answered since the look: what it drives off is already on its way."""
        return any(
            record.step == spec.name
            and record.action is StepAction.DO
            and record.state is not StepState.INTENDED
            and not self.is_gentle(record)
            for record in self.records
        )

    def _idle_before(self, place: int) -> bool:
        """Whether every probe had said that the node is idle, before this place of the records."""
        idle = {r.step for r in self.records[:place] if r.state is StepState.OK}
        return all(probe.name in idle for probe in self.probes)

    def _looks(self, probe: StepSpec) -> list[StepRecord]:
        return [r for r in self.records if r.step == probe.name and r.action is StepAction.LOOK]


def _is_spent(looks: Sequence[StepRecord]) -> bool:
    """Whether the last looks told nothing, as often as that is believed to pass."""
    last = looks[-UNKNOWN_TRIES:]
    told = (StepState.UNKNOWN, StepState.FAILED)
    return len(last) == UNKNOWN_TRIES and all(look.state in told for look in last)
